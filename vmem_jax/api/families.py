"""families: the variants of a step that the search chooses from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vmem_jax.api.corrections import corrected
from vmem_jax.conv.candidates import learner
from vmem_jax.core.plan import Plan, form_of
from vmem_jax.policy import AbstractPolicy, Keep
from vmem_jax.policy.base import Splitting
from vmem_jax.rewrite.compression import compressible
from vmem_jax.search.attempt import Tried
from vmem_jax.search.log import SearchLog, What
from vmem_jax.search.params import DEFAULT as PARAMS
from vmem_jax.search.variant import Family, MadeLater, Variant
from vmem_jax.techniques import TECHNIQUES, Form, StepContext
from vmem_jax.techniques.bits import in_bits, likely_to_fit, packs, with_bits
from vmem_jax.techniques.carry import carry_contexts, with_carry, with_passes
from vmem_jax.techniques.compress import compressing, compressing_loops, with_compressed
from vmem_jax.techniques.logits import logit_chunks, with_logits
from vmem_jax.techniques.loops import (
    least_outside_loops,
    loop_contexts,
    lowest_need,
    peaks_outside_loops,
    with_loops,
)
from vmem_jax.techniques.steps_in_loops import opened_contexts
from vmem_jax.techniques.sub_batches import (
    by_size,
    is_divisible,
    least_in_parts,
    parts_of,
    whole_limits,
)

PARTS_DO_NOT = "its batch runs in sub-batches, which do not compress"


def groups_of(
    step: StepContext, budget: int | None, log: SearchLog, tried: Sequence[Tried]
) -> list[Sequence[Family]]:
    """The groups of families, in the order in which the search tries them.

    First the chosen policy, with the policies that may replace it where these are faster; then with
    masks in bits, if bytes were expected to fit; then with transfers, if it had none; either also
    where these may be enough faster than what fits; then the policies that replace it only where
    nothing else fits.
    """
    settings = step.settings
    parts = parts_of(step)
    make = lambda context, count: variant_of(context, settings.policy, count)
    made = functools.partial(make, step)  # the others are bounded by it, too
    own = Family(parts.counts, made, settings.splitting, alike=True, **_in_parts(step))
    if settings.splitting is Splitting.FEWEST:
        own = _by_size(step, own, settings.policy, budget)
    first = [own]
    compresses = "compress" in settings.named and "compress" not in log.skipped
    if compresses and 1 not in parts.counts:
        log.add(What.SKIPPED, "compress", why=PARTS_DO_NOT)
    elif compresses:
        variants, why = compressing(step, lambda s: make(s, 1), budget, PARAMS, log)
        if why:
            log.add(What.SKIPPED, "compress", why=why)
        more = [count for count in own.counts if count not in (1, -parts.samples)]
        first = [Family((1,), functools.partial(_same, v)) for v in variants]
        first += [dataclasses.replace(own, counts=more)] if more else []
    others = [(policy, _other(step, policy)) for policy in settings.policy.instead]
    others = [(policy, other) for policy, other in others if other.counts]
    packed = in_bits(step, budget)
    own_fits = packed is not step and likely_to_fit(step, budget)
    # stacks that do not fit are of use if they may leave or shrink
    shrinks = compresses or not step.immovable
    # where bytes do not fit, other forms have nothing to gain from them
    looping = lambda every: _looping(step, step if own_fits else packed, budget, every)
    spare = lambda every: _forms(packed, budget, every) if own_fits else []
    loops = looping(shrinks)
    first += [_of_loops(context) for context in loops]
    inside = [
        form
        for context in opened_contexts(step, budget)
        for form in (context, *_looping(context, in_bits(context, budget), budget, shrinks))
    ]
    first += [_of_loops(context) for context in inside]
    compressed: list[StepContext] = []
    if compresses and 1 in parts.counts:
        compressed = [*compressing_loops(loops, budget)]
        first += map(_of_loops, compressed)
    forms = lambda: (step, *loops, *inside, *compressed, *spare(shrinks))
    first += _of_tried(step, forms, budget, tried)
    moves_at_last = bool(step.transport and step.immovable and "offload" in settings.allowed)

    def last() -> Iterator[Family]:
        moving = functools.partial(variant_of, step, settings.policy, moves=True)
        at_last = Family(parts.counts, moving, settings.splitting, **_in_parts(step))
        if settings.splitting is Splitting.FEWEST:
            at_last = _by_size(step, at_last, settings.policy, budget, moves=True)
        families = (
            at_last,
            *(
                _of_loops(context, moves=True)
                for context in (*looping(True), *inside, *compressed, *spare(True))
            ),
        )
        gain = PARAMS.transfers_must_gain
        yield from (dataclasses.replace(family, must_gain=gain) for family in families)

    bound = lambda: own.make(own.counts[0]).lower_bound()
    gains = lambda share: lambda seconds: bound() < (1 - share) * seconds
    groups: list[Sequence[Family]] = [first]
    if own_fits:
        in_spare = lambda: map(_of_loops, spare(shrinks))
        groups.append(MadeLater(in_spare, gains(PARAMS.time_tolerance)))
    if moves_at_last:
        groups.append(MadeLater(last, gains(PARAMS.transfers_must_gain)))
    searched = not settings.policy.spared(step.traced.captured.program)
    if searched and not step.immovable and "compress" not in settings.named:
        # where they are enough faster than what the bound of the policy's own plans leaves
        first += [
            dataclasses.replace(
                other,
                splitting=Splitting.FASTEST if len(other.counts) > 1 else Splitting.WHOLE,
                must_gain=PARAMS.time_tolerance,
                bounded_by=own.make,
            )
            for _, other in others
        ]
    else:
        groups.append(
            [
                _by_size(step, other, policy, budget, moves=bool(step.transport))
                if other.splitting is Splitting.FEWEST
                else other
                for policy, other in others
            ]
        )
    return [group for group in groups if group]


def _looping(
    step: StepContext, base: StepContext, budget: int | None, every: bool
) -> list[StepContext]:
    """The forms of `base`, and those of `step` whose convolutions carry what stands around them;
    `every` as `loop_contexts` has it."""
    carrying = carry_contexts(step)
    # with other stacks they run as a whole
    wholes = carrying if (step.settings.sub_batches or 1) == 1 else []
    more = (c for form in wholes for c in loop_contexts(form, budget, every))
    return [*_forms(base, budget, every), *filter(is_divisible, carrying), *more]


def _forms(base: StepContext, budget: int | None, every: bool) -> list[StepContext]:
    """The forms of the step with other logits or stacks, and `base` itself if it packs masks; `every`
    as `loop_contexts` has it. Those that cannot run in the sub-batches that are asked for are none.

    More chunks of logits are of use only to what peaks outside of loops with fewer. For fewer with
    which nothing can fit no other stacks are chosen, unless that may have the lowest need.
    """
    found = [base] if packs(base) else []
    forms, large, form = list[StepContext](), list[StepContext](), base
    for count in logit_chunks(base, budget):
        assert budget is not None, "without a budget there are no chunks"
        fits = least_outside_loops(form) <= budget
        (forms if fits else large).append(form)
        if fits and not peaks_outside_loops(form, budget):
            break
        form = with_logits(base, count)
        found.append(form)
    else:
        forms.append(form)
    may_be_lowest = lambda form: least_outside_loops(form) <= lowest_need(forms[-1], budget)
    forms = [*filter(may_be_lowest, large), *forms]
    limits = whole_limits(base, budget)
    found += (c for form in forms for c in loop_contexts(form, budget, every, limits))
    return [*filter(is_divisible, found)]


def _in_parts(step: StepContext) -> dict[str, Any]:
    """What families of `step` in sub-batches have in common."""
    least = functools.partial(least_in_parts, step)
    return {"between": parts_of(step).between, "least": least}


def _of_loops(context: StepContext, moves: bool | None = None) -> Family:
    """The family of a step whose loops stack other values, planned by the chosen policy."""
    settings = context.settings
    make = functools.partial(variant_of, context, settings.policy, moves=moves)
    program = context.traced.captured.program
    if program.opened:
        return Family((1,), make)
    counts = [1] if program.compressed else parts_of(context).counts
    return Family(counts, make, settings.splitting, alike=True, **_in_parts(context))


def _of_tried(
    step: StepContext,
    forms: Callable[[], Iterable[StepContext]],
    budget: int | None,
    tried: Sequence[Tried],
) -> list[Family]:
    """The families of `tried` plans that fit, but whose loops stack, or that compress, what no other
    of `forms` does: which forms there are depends on the budget, and an earlier search had another
    one."""
    own = lambda one: (form_of(one), one.compressed)
    has_own = lambda plan: plan.kept is not None or plan.compressed
    fitting = [one.plan for one in tried if one.fits(budget) and has_own(one.plan)]
    stacks = {own(form.traced.captured.program) for form in forms()} if fitting else set()
    found = []
    for plan in fitting:
        if own(plan) not in stacks:
            stacks.add(own(plan))
            form = form_for(step, plan)
            make = functools.partial(variant_of, form, step.settings.policy)
            alike = [other.plan for other in tried if own(other.plan) == own(plan)]
            counts = sorted({p.sub_batches for p in alike if p.sub_batch_size is None})
            found.append(Family(counts, make, alike=True))
    return found


def form_for(step: StepContext, plan: Plan) -> StepContext:
    """The form of `step` that `plan` is made for."""
    if plan.opened:
        step = step.opened or step
    if plan.bits:
        step = with_bits(step)
    if plan.logit_chunks > 1:
        step = with_logits(step, plan.logit_chunks)
    if plan.carried:
        step = with_carry(step, plan.carried)
    if plan.summed or plan.pooled:
        step = with_passes(step)
    if plan.kept is not None:
        step = with_loops(step, plan.kept, plan.segments)
    return _compressed(step, plan)


def _compressed(step: StepContext, plan: Plan) -> StepContext:
    """`step`, the form that `plan` is made for, with what that compresses; itself where it cannot."""
    sizes = dict(plan.compressed)
    if not sizes or not {*sizes} <= {*compressible(step.traced.captured, 0)}:
        return step
    return step.of(with_compressed(step.traced, sizes, [*sizes]))


def _other(step: StepContext, policy: AbstractPolicy) -> Family:
    """The family of `step` planned by another policy, which may move values wherever possible."""
    parts = parts_of(step)
    counts = [n for n in parts.counts if n == 1 or policy.splitting is not Splitting.WHOLE]
    make = functools.partial(variant_of, step, policy, moves=bool(step.transport))
    return Family(counts, make, policy.splitting, **_in_parts(step))


def _by_size(
    step: StepContext,
    family: Family,
    policy: AbstractPolicy,
    budget: int | None,
    moves: bool | None = None,
) -> Family:
    """`family`, which takes the fewest sub-batches that fit, from the size of equation 3 on."""
    parts = parts_of(step)
    if budget is None or len(parts.counts) == 1:
        return family

    def variant(samples: int) -> Variant:
        count = -(-parts.samples // samples)
        is_even = samples == -(-parts.samples // count)
        return variant_of(step, policy, count, moves, None if is_even else samples)

    counts, make = by_size(parts, variant, budget)
    return dataclasses.replace(family, counts=counts, make=make)


def _same(variant: Variant, count: int) -> Variant:
    del count
    return variant


def variant_of(
    step: StepContext,
    policy: AbstractPolicy,
    count: int,
    moves: bool | None = None,
    samples: int | None = None,
) -> Variant:
    """`step` in `count` sub-batches by `policy`, made once: it remembers its bounds.

    Args:
      moves: whether plans may move values; by default unless `step.immovable` says otherwise.
      samples: of each sub-batch but the last; by default as even as they can be.
    """
    moves = not step.immovable if moves is None else moves
    key = f"variant {policy!r} {count} {moves} {samples}"
    return step.cached(key, lambda: _new_variant(step, policy, count, moves, samples))


def _new_variant(
    step: StepContext, policy: AbstractPolicy, count: int, moves: bool, samples: int | None
) -> Variant:
    traced = step.traced if count == 1 else parts_of(step, count).into(count, samples)
    costs = step.plain_costs if isinstance(policy, Keep) else step.costs
    form = Form(traced, count, policy, policy, costs, moves)
    for technique in TECHNIQUES.values():
        form = technique.adapt(step, form)
    traced, program = form.traced, form.traced.captured.program
    name = policy.name if count == 1 else f"{policy.name} in {count} sub-batches"
    name += f" of {samples} samples" if samples else ""
    if program.kept is not None:
        name += ", other stacks"
    if program.opened:
        name += ", planned inside its loop"
    if program.logit_chunks > 1:
        name += f", logits in {program.logit_chunks} chunks"
    if program.bits:
        name += ", masks in bits"
    if program.carried:
        name += f", {len(program.carried)} convolutions with what stands around them"
    if program.summed:
        name += f", {program.summed} passes for several sums each"
    if program.pooled:
        name += f", {program.pooled} max-pools with their index"
    if program.row_kernels:
        name += f", {program.row_kernels} kernels of rows"
    learn = learner(program, step.devices[0], step.target, step.settings.profile)
    compiles = functools.partial(step.compile, traced)
    costs = corrected(step, program, form.costs)
    variant = Variant(name, program, form.policy, costs, compiles, traced)
    return dataclasses.replace(variant, learn=learn) if form.convolves else variant
