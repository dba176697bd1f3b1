"""candidates: the configurations of each convolution of a program on its device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from vmem_jax.conv.compiled import Own, own_convolutions
from vmem_jax.conv.pick import by_xla, slice_by_xla
from vmem_jax.conv.timings import Known, known, profile_on
from vmem_jax.core.cards import machine_for
from vmem_jax.core.convolution import XLA, Configuration, Convolution, Epilogue, Micro
from vmem_jax.core.costs import Costs, Source
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Program
from vmem_jax.policy.workspace_division import desirable, front
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes

Choices = dict[int, tuple[Configuration, ...]]

_MOST_PARTS = 32
"""Of a batch. Beyond it launches cost more than a workspace is worth."""

_CHANCE = 0.1
"""Share by which the shortest of some dozen timings of equally fast kernels is below the others.
Taken at their word, 294 convolutions of ResNet-152 gained 6 % of the step, which was 1.7 % slower."""

_ALONE = 1e-4
"""Seconds by which XLA's own convolution may be timed too slow by itself, with what prepares its
operands, which a step fuses into others. ResNet-152, ResNet-50 in TF32 and GoogLeNet, whose
convolutions are nearly all faster by cuDNN by less than that each, and by 8, 3 and 9 % of the step in
all, gained nothing of it on an H200."""


_STRICT = 1.22
"""How many times as long as cuDNN's fastest XLA's own convolutions in strict float32 take, where they
were not timed: those of VGG-16(256) take 350 ms of a step on an H200, cuDNN's fastest 287. That is so
in sub-batches, too, and though XLA names an engine that was timed: by these they would take 302."""


def choices_of(
    name: str,
    program: Program,
    costs: Costs,
    device: jax.Device,
    target: str | None = None,
    profile: bool | None = None,
    whole: tuple[Program, Costs] | None = None,
    sizes: BatchSizes = BatchSizes.POWER_OF_TWO,
) -> Choices:
    """For every convolution of `program` its desirable sets on `device`, after XLA's own.

    One for each choice of sizes: dividing makes useless what is all there is for the whole batch.

    On a GPU the configurations are cuDNN's, as `vmem-jax profile --conv` timed them. XLA's own is
    the fastest of the whole batch whatever its workspace, since that is what XLA's autotuner takes,
    until a compiled step shows it (`learned`); in strict float32 it takes longer. A convolution of
    which the whole batch was not timed stays XLA's. Not all that cuDNN offers is offered to that
    autotuner, though: in a part of a batch, where XLA's own was not timed, it takes as much longer
    than the fastest as it does in the whole. A configuration that leaves the epilogue, which XLA's
    own has in the same kernel, to a pass of its own takes longer by that (`front_of_variants`). On a
    CPU they are XLA's own convolution, whole and of `sizes` down to a thirty-second of the batch,
    with the workspace that the compiler says and the seconds of a roofline, scaled so that the whole
    has those of `costs`.

    Args:
      name: of the step, for errors.
      target: a card that is not there, by name.
      profile: whether to time on a GPU what is not known; None takes what is known, False nothing.
      whole: where `program` runs parts of a batch, the step with all of it, and its costs.
      sizes: of micro-batches, on a CPU; each is compiled.

    Raises:
      ValueError: there is no convolution that can be divided, or nothing is known of them.
      ImportError: on a GPU, there is no cuDNN, or the extension was built without it.
    """
    found = convolutions_in(program)
    refuse = lambda why: ValueError(
        f'`{name}` cannot divide convolutions: {why}. Leave "workspace" out of `allow`, and take '
        "another policy than `ucudnn`."
    )
    if target is not None:
        raise refuse(f"what they take on {target!r} can be measured on that card alone")
    if not found:
        raise refuse("it has none on one device, of one float dtype and at most three dimensions")
    if device.platform == "gpu":
        if profile:
            profile_on(device, [v for c in found.values() for v in c.variants])
        micros_known = _known(device, profile)
        longer = {} if whole is None else _longer_by_xla(*whole, micros_known)
        if whole is not None:
            micros_known = _or_from_larger(micros_known)
        choices = _of_cudnn(program, costs, machine_for(device.device_kind), micros_known, longer)
    else:
        choices = _of_slices(program, costs, machine_for(device.device_kind), sizes)
    if not choices:
        raise refuse(
            f"none of its {len(set(found.values()))} was measured on {device.device_kind}: use "
            "`profile=True`, or run `vmem-jax profile --conv` there first"
        )
    return choices


def with_choices(
    name: str,
    program: Program,
    costs: Costs,
    device: jax.Device,
    target: str | None,
    profile: bool | None,
    whole: tuple[Program, Costs] | None = None,
    sizes: BatchSizes = BatchSizes.POWER_OF_TWO,
) -> tuple[Costs, str]:
    """`costs` with what can do each convolution; or as they are, and why nothing is known.

    The arguments are those of `choices_of`.
    """
    try:
        choices = choices_of(name, program, costs, device, target, profile, whole, sizes)
    except (ValueError, ImportError) as error:
        return costs, str(error)
    return dataclasses.replace(costs, convolutions=choices), ""


def learner(
    program: Program, device: jax.Device, target: str | None, profile: bool | None
) -> Callable[[Costs, Any], Costs]:
    """`learned` of (costs, compiled step), where something can be: on a GPU."""
    if target is not None or device.platform != "gpu":
        return lambda costs, compiled: costs

    @functools.cache  # a file, which is the same for every attempt
    def micros_known() -> Known:
        with contextlib.suppress(ImportError):  # XLA's own need no extension
            return _known(device, profile)
        return lambda convolution: []

    return lambda costs, compiled: learned(program, micros_known(), costs, compiled)


def learned(program: Program, micros_known: Known, costs: Costs, compiled: Any) -> Costs:
    """`costs` with what XLA's own convolutions are in a step compiled for a GPU.

    A step that was not timed by itself takes as long as what XLA chose, where that was timed there;
    else as long as was thought, and no less than the fastest that needs no larger workspace.

    Args:
      micros_known: what is known of a convolution on that GPU.
    """
    found = convolutions_in(program)
    owns = own_convolutions(compiled.as_text(), set(found.values()))
    choices = dict(costs.convolutions)
    for s, convolution in found.items():
        if convolution not in owns:
            continue
        before, *others = choices.get(s) or (None,)
        seconds = costs.seconds[s] if before is None else before.seconds
        if not _was_timed(costs, s):
            times = program.steps[s].times
            once = _seconds_of(owns[convolution], convolution, micros_known, seconds / times)
            seconds = max(times * once, seconds if convolution.strict else 0.0)
        unsure = _unsure(program, costs, s)
        choices[s] = _after_own(convolution, owns[convolution].workspace, seconds, others, unsure)
    return dataclasses.replace(costs, convolutions=choices)


def _longer_by_xla(program: Program, costs: Costs, micros_known: Known) -> dict[Convolution, float]:
    """For convolutions of any batch what XLA's own takes, as measured, of cuDNN's fastest.

    In strict float32 XLA's take up to 3.5 times as long: that of 3x3 on 14x14 backwards on an H200.
    Of depthwise ones XLA's may be faster than all that cuDNN lists.
    """
    found: dict[Convolution, float] = {}
    for s, convolution in convolutions_in(program).items():
        timed = _of_whole(convolution, map(micros_known, convolution.variants))
        if timed and _was_timed(costs, s):
            fastest = min(m.seconds for m in timed) * program.steps[s].times
            gain = costs.seconds[s] - fastest
            is_significant = gain < 0 or gain > _unsure(program, costs, s)
            longer = costs.seconds[s] / fastest if is_significant else 1.0
            of_any = convolution.with_batch(0)
            found[of_any] = min(longer, found.get(of_any, longer))
    return found


def _or_from_larger(micros_known: Known) -> Known:
    """`micros_known`; of a part whose size was not timed also what the next larger size that was, up
    to twice as many samples, takes: the same workspace, and seconds by the number of samples."""

    def found(convolution: Convolution) -> list[Micro]:
        micros = micros_known(convolution)
        batch = convolution.batch
        if any(m.batch == batch for m in micros):
            return micros
        larger = [m for m in micros_known(convolution.with_batch(2 * batch)) if m.batch > batch]
        size = min((m.batch for m in larger), default=0)
        return micros + [
            dataclasses.replace(m, batch=batch, seconds=m.seconds * batch / size)
            for m in larger
            if m.batch == size
        ]

    return found


def _of_cudnn(
    program: Program,
    costs: Costs,
    machine: Machine,
    micros_known: Known,
    longer: Mapping[Convolution, float],
) -> Choices:
    choices: Choices = {}
    for s, convolution in convolutions_in(program).items():
        micros_of = {variant: micros_known(variant) for variant in convolution.variants}
        timed = {m.batch for micros in micros_of.values() for m in micros}
        # each once: of "all" often nothing but powers of two was timed
        by_sizes: dict[frozenset[int], list[Configuration]] = {
            frozenset(timed.intersection(batch_sizes(convolution.batch, sizes))): []
            for sizes in BatchSizes
        }
        besides = program.steps[s].epilogue_nbytes / machine.bandwidth
        for sizes, found in by_sizes.items():
            within = {v: [m for m in each if m.batch in sizes] for v, each in micros_of.items()}
            every = front_of_variants(convolution, within, besides)
            found.extend(one.scaled(program.steps[s].times) for one in every)
        if whole := _of_whole(convolution, micros_of.values()):
            fastest, workspace = min((m.seconds, m.workspace) for m in whole)
            slower = longer.get(convolution.with_batch(0), _STRICT if convolution.strict else 1.0)
            own = fastest * program.steps[s].times * slower
            seconds = costs.seconds[s] if _was_timed(costs, s) else own
            most = machine.most_parts(fastest - machine.launch)
            others = (one for one in itertools.chain(*by_sizes.values()) if len(one.micros) <= most)
            unsure = _unsure(program, costs, s)
            choices[s] = _after_own(convolution, workspace, seconds, dict.fromkeys(others), unsure)
    return choices


def front_of_variants(
    convolution: Convolution, micros_of: Mapping[Convolution, Iterable[Micro]], besides: float
) -> tuple[Configuration, ...]:
    """The desirable set of `convolution`, of micro-batches that do its epilogue and that do not.

    A configuration may have both. The epilogue is then a pass over all that the call made, as where
    none does it, so it takes `besides` seconds whatever the mix; what is best of all micro-batches
    together, or of those with the epilogue by themselves, is therefore best of every mix.

    Args:
      micros_of: for each of the variants of `convolution` what was timed.
    """
    alone = convolution.with_epilogue(Epilogue.NONE)
    fused = list(micros_of[convolution]) if convolution.epilogue else []
    bare = [dataclasses.replace(m, bare=True) for m in micros_of[alone]]
    found = [*front(fused, convolution.batch), *front([*fused, *bare], convolution.batch)]
    return desirable(_named(convolution, one, besides) for one in found)


def _named(convolution: Convolution, one: Configuration, besides: float) -> Configuration:
    """`one` with its epilogue, and with the seconds of the pass that does what it leaves out."""
    if all(m.bare for m in one.micros):
        plain = (dataclasses.replace(m, bare=False) for m in one.micros)
        return Configuration(tuple(plain)).longer(besides)
    one = dataclasses.replace(one, epilogue=convolution.epilogue)
    return one.longer(besides) if one.bare_samples else one


def _of_slices(program: Program, costs: Costs, machine: Machine, sizes: BatchSizes) -> Choices:
    choices: Choices = {}
    for s, convolution in convolutions_in(program).items():
        every = batch_sizes(convolution.batch, sizes)
        own = by_xla(convolution)
        most = min(_MOST_PARTS, machine.most_parts(own.seconds - machine.launch))
        parts = [b for b in every if convolution.batch / most <= b < convolution.batch]
        micros = [own, *(slice_by_xla(convolution.with_batch(b)) for b in parts)]
        scale = costs.seconds[s] / own.seconds
        found = [c.scaled(scale) for c in front(micros, convolution.batch)]
        choices[s] = _after_own(convolution, own.workspace, costs.seconds[s], found)
    return choices


def _known(device: jax.Device, profile: bool | None) -> Known:
    return known(device) if profile is not False else lambda convolution: []


def _seconds_of(own: Own, convolution: Convolution, micros_known: Known, default: float) -> float:
    variant = convolution.variants[-1 if own.fused else 0]
    whole = _of_whole(convolution, [micros_known(variant)])
    within = [m for m in whole if m.workspace <= own.workspace]
    chosen = own.engine, own.workspace, own.channels
    same = [m for m in within if (m.engine, m.workspace, m.channels) == chosen]
    if same:
        return min(m.seconds for m in same)
    return max(default, min((m.seconds for m in within), default=default))


def _of_whole(convolution: Convolution, timed: Iterable[Iterable[Micro]]) -> list[Micro]:
    """Those of `timed` that do all of its batch."""
    return [m for micros in timed for m in micros if m.batch == convolution.batch]


def convolutions_in(program: Program) -> dict[int, Convolution]:
    """The steps of `program` that are convolutions."""
    steps = enumerate(program.steps)
    return {s: step.convolution for s, step in steps if step.convolution is not None}


def _unsure(program: Program, costs: Costs, s: int) -> float:
    return _ALONE * program.steps[s].times if _was_timed(costs, s) else 0.0


def _was_timed(costs: Costs, s: int) -> bool:
    return bool(costs.sources) and costs.sources[s] in (Source.MEASURED, Source.SCALED)


def _after_own(
    convolution: Convolution,
    workspace: int,
    seconds: float,
    others: Iterable[Configuration],
    unsure: float = 0.0,
) -> tuple[Configuration, ...]:
    """XLA's own, and those of `others` that are better in something.

    XLA took the fastest that it timed, so what is faster by our timings, and by little, is as fast.

    Args:
      workspace: bytes, of the library's call in XLA's own.
      unsure: seconds by which XLA's own may take less than `seconds`.
    """
    workspace += convolution.padded_nbytes
    own = Configuration((Micro(convolution.batch, XLA, (), workspace, seconds),))
    little = max(_CHANCE * seconds, unsure)
    as_fast = lambda c: seconds - little < c.seconds < seconds
    corrected = (c.longer(seconds - c.seconds) if as_fast(c) else c for c in others)
    better = (c for c in corrected if c.workspace < workspace or c.seconds < seconds)
    return (own, *better)
