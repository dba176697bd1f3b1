"""carry: kernels of convolutions compute what stands around them.

In float16 cuDNN's convolutions normalise their operand and add up their result, with scale and bias
in float16. In both types of 16 bits kernels of 1×1 convolutions compute in their tiles a
normalisation, a ReLU and a residual sum before a convolution, the statistics of the next batch norm
behind it, and in the backward pass both gradients and the sums of the batch norm before. Their values
are the same but for the order of sums. A normalised value that only such kernels read is not written,
and not kept. A form of the step has the one or the other; the search takes the fastest. In each, one
pass makes all sums of the gradient behind a ReLU that is left, where XLA makes two, and a max-pool
whose windows overlap has one kernel for its result and its index, and one for its gradient. A form
with these passes alone also runs in sub-batches; convolutions that carry need all samples at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vmem_jax import jax_compat as compat
from vmem_jax.capture.carried import Carrying, find_carrying
from vmem_jax.capture.normalising import Normalising, find_normalising
from vmem_jax.capture.sub_batches import Replaced
from vmem_jax.conv.carrying import Way, by_xla, ways
from vmem_jax.core.convolution import Convolution
from vmem_jax.core.machine import Machine
from vmem_jax.jax_compat import ClosedJaxpr
from vmem_jax.rewrite import passes
from vmem_jax.rewrite.carried import describe, with_carried
from vmem_jax.rewrite.normalising import with_normalising
from vmem_jax.techniques import own_kernels
from vmem_jax.techniques.base import AbstractTechnique
from vmem_jax.techniques.context import StepContext
from vmem_jax.techniques.sub_batches import parts_of


class Carry(AbstractTechnique):
    """Normalisations and sums in the kernels of convolutions."""

    name: ClassVar[str] = "carry"
    verb: ClassVar[str] = "compute what stands around convolutions in their kernels"

    def unusable(self, step: StepContext) -> str:
        if why := own_kernels.why_not(step, is_named=self.name in step.settings.named):
            return why
        if with_passes(step) is not step:
            return ""
        found = _found(step)
        if not found.products and not found.normalising:
            return (
                "no 1×1 convolution in 16 bits, channels last, stands beside elementwise work, no "
                "other in float16 beside a batch norm, no ReLU's gradient in 16 bits has two sums, "
                "and no max-pool in 16 bits has windows that overlap"
            )
        if _must_divide(step):
            return "the kernels that carry need all samples at once, and `sub_batches` is given"
        if not _choices(step):
            return "no kernel for convolutions of these widths is known to be faster"
        return ""


def _must_divide(step: StepContext) -> bool:
    """Whether `sub_batches` says that the batch runs in parts."""
    return (step.settings.sub_batches or 1) > 1


def carry_contexts(step: StepContext) -> list[StepContext]:
    """The forms of `step` whose convolutions carry what stands around them, each with one pass for
    several sums, and each without, which needs less where what such a pass touches is the peak; none
    if it does not use that. The last has such passes alone, where there is no other or its batch can
    run in parts, which that of no other can."""
    if Carry.name not in step.settings.allowed or Carry().unusable(step):
        return []
    form = lambda chosen: step.cached(f"carried {chosen}", lambda: with_carry(step, chosen))
    choices = [] if _must_divide(step) else _choices(step)
    without = [form(chosen) for chosen in choices]
    forms = list(dict.fromkeys([*map(with_passes, without), *without]))
    apart = with_passes(step)
    if not forms or (apart is not step and len(parts_of(apart).counts) > 1):
        forms.append(apart)
    return forms


def with_passes(step: StepContext) -> StepContext:
    """`step` with one kernel for each overlapping max-pool and its index, and one pass for the sums
    that its kernel can compute together; itself without such."""
    return step.cached("passes", lambda: _with_passes(step))


def _with_passes(step: StepContext) -> StepContext:
    replace = functools.partial(passes.with_passes, on_gpu=step.platform == "gpu")
    before = step.traced.captured.separate
    [separate], counts = replace([before])
    if not any(counts.values()):
        return step
    return _with(step, separate, Replaced(before, replace), **counts)


def with_carry(step: StepContext, chosen: Sequence[int]) -> StepContext:
    """`step` with the chosen of the convolutions that can, as a plan says; itself where these cannot
    here."""
    found = _found(step)
    captured, first = step.traced.captured, len(found.products)
    if not chosen or max(chosen) >= first + len(found.normalising):
        return step
    if max(chosen) < first:
        flat = with_carried(captured.separate, [found.products[i] for i in chosen])
    else:
        every = [found.normalising[i - first] for i in chosen if i >= first]
        ways = _ways(step)
        if len(every) < len(chosen) or any(each.matched.convolution not in ways for each in every):
            return step
        flat = with_normalising(
            captured.separate,
            {each: ways[each.matched.convolution].configuration for each in every},
        )
    return _with(step, flat, carried=tuple(chosen))


def _with(
    step: StepContext, separate: ClosedJaxpr, replaced: Replaced | None = None, **fields: Any
) -> StepContext:
    """`step` by the equations `separate`, with `fields` in its program."""
    captured = step.traced.captured.rewritten(separate)
    program = dataclasses.replace(captured.program, **fields)
    captured = dataclasses.replace(captured, program=program, replaced=replaced)
    return step.of(dataclasses.replace(step.traced, captured=captured, plain=captured.flat))


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a step has, in the order of the indices in a plan: `products`, then `normalising`."""

    products: tuple[Carrying, ...]
    normalising: tuple[Normalising, ...]


def _found(step: StepContext) -> _Found:
    flat = step.traced.captured.separate
    return step.cached("carrying", lambda: _Found(find_carrying(flat), find_normalising(flat)))


def _choices(step: StepContext) -> list[tuple[int, ...]]:
    """Convolutions that are worth it together: those that cuDNN normalises for in less time than
    passes take; those whose products have a kernel that is known to be faster. Where there is no GPU
    the first of these that there are, all by XLA's passes."""
    found, on_gpu = _found(step), step.platform == "gpu"
    worth = _worth(found.normalising, _ways(step), step.machine, on_gpu)
    normalising = tuple(len(found.products) + i for i in worth)
    eqns = compat.open_jaxpr(step.traced.captured.separate).eqns
    fits = lambda each: not on_gpu or describe(each, eqns).tiling is not None
    products = tuple(i for i, each in enumerate(found.products) if fits(each))
    choices = [chosen for chosen in (normalising, products) if chosen]
    return choices if on_gpu else choices[:1]


def _ways(step: StepContext) -> Mapping[Convolution, Way]:
    """How each convolution runs that can normalise; those without an engine are left out."""
    wanted = [each.matched.convolution for each in _found(step).normalising]
    if step.platform != "gpu":
        return {c: by_xla(c) for c in wanted}
    where = step.target or step.devices[0]
    return step.cached("ways", lambda: ways(wanted, where, step.machine, step.settings.profile))


def _worth(
    found: Sequence[Normalising],
    known: Mapping[Convolution, Way],
    machine: Machine,
    on_gpu: bool,
) -> list[int]:
    """Indices of `found`: all of one operand that then need not exist, where they take less time than
    the passes that they replace, one over their results and two over the operand; and likewise of
    the others those with sums alone."""

    def gain(every: Sequence[int]) -> float:
        each = [found[i].matched.convolution for i in every]
        if any(c not in known for c in each):
            return -math.inf
        passed = 2.0 * each[0].x_nbytes if each[0].prologue else 0.0
        passed += sum(each[n].y_nbytes for n, i in enumerate(every) if found[i].sums)
        return passed / machine.bandwidth - sum(known[c].more for c in each)

    groups: dict[Any, list[int]] = {}
    for i, one in enumerate(found):
        groups.setdefault(i if one.prologue is None else one.prologue.operand, []).append(i)
    chosen: list[int] = []
    taken: set[int] = set()  # equations; those with a prologue are found first
    for every in groups.values():
        free = taken.isdisjoint(found[i].equation for i in every)
        if free and (gain(every) > 0 or not on_gpu):
            chosen += every
            taken.update(found[i].equation for i in every)
    return sorted(chosen)
