"""planner: plans and compiles a traced step by the settings of `jit`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from absl import logging

from vmem_jax.api import named_peaks
from vmem_jax.api.entry import CompiledStep
from vmem_jax.api.failure import budget_error
from vmem_jax.api.garbage import uncollected
from vmem_jax.api.helps import helps_of
from vmem_jax.api.notices import notices
from vmem_jax.api.records import record_of
from vmem_jax.conv.candidates import learner
from vmem_jax.conv.verify import try_configurations
from vmem_jax.core.need import need_nbytes
from vmem_jax.core.parked import parks
from vmem_jax.core.plan import Plan, form_of
from vmem_jax.core.planned import predicted_need
from vmem_jax.core.validate import check_made_for
from vmem_jax.devices.device import limit_nbytes
from vmem_jax.errors import PlanError, TechniqueError, VmemError, show_nbytes
from vmem_jax.logs import warn_once
from vmem_jax.policy import AbstractPolicy, Keep
from vmem_jax.policy.base import Infeasible, Splitting
from vmem_jax.progress import doing
from vmem_jax.rewrite.compression import compressible
from vmem_jax.search.attempt import Attempt, Compiles, Found, Record, Tried
from vmem_jax.search.log import SearchLog, What
from vmem_jax.search.params import DEFAULT as PARAMS
from vmem_jax.search.params import SearchParams
from vmem_jax.search.search import Search
from vmem_jax.search.variant import Family, Variant
from vmem_jax.techniques import TECHNIQUES, Form, StepContext
from vmem_jax.techniques.bits import in_bits, likely_to_fit, packs, with_bits
from vmem_jax.techniques.carry import carry_contexts, with_carry
from vmem_jax.techniques.compress import compressing, compressing_loops, with_compressed
from vmem_jax.techniques.logits import logit_contexts, with_logits
from vmem_jax.techniques.loops import loop_contexts, with_loops
from vmem_jax.techniques.settings import Settings
from vmem_jax.techniques.sub_batches import by_size, parts_of

_ALWAYS_SAID = ("offload", "sub_batches")
"""Techniques whose absence is worth a line also where the user names no technique."""

_PARTS_DO_NOT = "its batch runs in sub-batches, which do not compress"


def plan_step(step: StepContext) -> CompiledStep:
    """The fastest plan of `step` that the search finds, compiled within the budget.

    Raises:
      BudgetError: no plan fits.
      PlanError: the given plan is for another step, or does not fit.
      TechniqueError: a required technique cannot be used.
    """
    if step.settings.plan is not None:
        return _by_given(step, step.settings.plan)
    settings, log = step.settings, checked_log(step)
    budget, plain_need = budget_nbytes(step)
    found = find_plan(step, budget, log, plain_need)
    if not found.fits:
        assert budget is not None, "without a budget everything fits"
        arguments = step.traced.captured.program.arguments_nbytes
        predict = functools.partial(_lowest_predicted, budget)
        helps = functools.partial(helps_of, step, log, predict=predict)
        named_peaks.keep(step, found.best.plan, found.best.need)
        raise budget_error(settings.policy.name, budget, found, arguments, helps)
    best = found.best
    if "compress" in settings.named and not best.plan.compressed and "compress" not in log.skipped:
        why = "no plan with it fits when it is compiled"
        if best.plan.kept is not None:
            why = "loops that stack other values do without"
        if settings.policy.compresses and not best.plan.moves:
            why = "the plan moves nothing"
        log.add(What.SKIPPED, "compress", why=_PARTS_DO_NOT if best.plan.sub_batches > 1 else why)
    need, compiles = show_nbytes(best.need), len(found.attempts)
    logging.info("%s: %s needs %s, after %d compiles", settings.name, best.plan, need, compiles)
    whole = functools.partial(_variant, step, settings.policy, 1)
    for text in notices(step, best, budget, plain_need, whole, PARAMS):
        warn_once(settings.name, text)
    policy = best.variant.policy
    origin = dataclasses.replace(best.variant.origin, plain=step.traced.plain)
    return CompiledStep(origin, budget, plain_need, best.costs, found.attempts, policy, log)


@uncollected()
def find_plan(
    step: StepContext,
    budget: int | None,
    log: SearchLog,
    plain_need: int | None = None,
    params: SearchParams = PARAMS,
    record: Record | None = None,
    compiles: Compiles = Compiles.ALL,
) -> Found:
    """What the search finds for `budget` bytes.

    Args:
      log: of `checked_log`.
      plain_need: bytes that plain jit needs, where that was compiled.
      record: of earlier searches; by default that of this process, or an empty one if nothing is
        compiled.
      compiles: as `Search` has it.
    """
    program = step.traced.captured.program
    if record is None and compiles is Compiles.NONE:
        record = Record()  # predictions are no part of what this process knows
    elif record is None:
        settings = dataclasses.replace(step.settings, name="", budget=None)
        record = record_of(program, (settings, step.target, step.inlined))
        for plan, need in () if record.all() else named_peaks.known(step):
            record.add(Tried(plan, need))
    groups = _groups(step, budget, log, record.all())
    untouched = None if step.traced.hosted else _variant(step, Keep(), 1)
    if untouched is not None and plain_need is not None:
        plain = Keep().plan(program, untouched.costs, None)
        assert isinstance(plain, Plan), "without a budget there is always a plan"
        record.add(Tried(plain, plain_need))
    may_stay = _may_stay(step.settings)
    with doing(f"planning {step.settings.name}"):
        made = Search(budget, untouched, may_stay, params, log, record, compiles)
        return made.run(groups)


def _may_stay(settings: Settings) -> bool:
    """Whether the step as plain jit runs it is as good as any plan that is no faster: no policy,
    technique or number of sub-batches is asked for."""
    wants = settings.required or settings.sub_batches is not None or "compress" in settings.named
    return settings.policy.name == "auto" and not wants


def budget_nbytes(step: StepContext) -> tuple[int | None, int | None]:
    """(the budget in bytes, plain jit's need in bytes or None if it was not compiled)."""
    budget, traced = step.settings.budget, step.traced
    if isinstance(budget, float):
        # a budget that plain jit meets is likely to run it
        plain_need = step.plain_need if budget < 1 else need_nbytes(step.plain)
        return int(budget * plain_need), plain_need
    own = sum(b.nbytes for b in traced.captured.program.buffers[: len(traced.avals)])
    return limit_nbytes(budget, traced.avals, own, step.target), None


def checked_log(step: StepContext) -> SearchLog:
    """A log with the allowed techniques that the step cannot use.

    Raises:
      TechniqueError: one of them is required.
    """
    settings, log = step.settings, SearchLog(step.settings.name)
    for name in settings.allowed:
        why = TECHNIQUES[name].unusable(step)
        if why and name in settings.required:
            verb = TECHNIQUES[name].verb
            raise TechniqueError(f"`{settings.name}` cannot {verb}: {why.removesuffix('.')}.")
        if why and (name in settings.named or name in _ALWAYS_SAID):
            log.add(What.SKIPPED, name, why=why)
    return log


# -- the variants that the search chooses from


def _groups(
    step: StepContext, budget: int | None, log: SearchLog, tried: Sequence[Tried]
) -> list[list[Family]]:
    """The groups of families, in the order in which the search tries them.

    First the chosen policy, with the policies that may replace it where these are faster; then with
    masks in bits, if bytes were expected to fit; then with transfers, if it had none; then the
    policies that replace it only where nothing else fits.
    """
    settings = step.settings
    parts = parts_of(step)
    make = lambda context, count: _variant(context, settings.policy, count)
    made = functools.cache(functools.partial(make, step))  # the others are bounded by it, too
    own = Family(parts.counts, made, settings.splitting, between=parts.between)
    if settings.splitting is Splitting.FEWEST:
        own = _by_size(step, own, settings.policy, budget)
    first = [own]
    compresses = "compress" in settings.named and "compress" not in log.skipped
    if compresses and 1 not in parts.counts:
        log.add(What.SKIPPED, "compress", why=_PARTS_DO_NOT)
    elif compresses:
        variants, why = compressing(step, lambda s: make(s, 1), budget, PARAMS, log)
        if why:
            log.add(What.SKIPPED, "compress", why=why)
        more = [count for count in own.counts if count not in (1, -parts.samples)]
        first = [Family((1,), functools.partial(_same, v)) for v in variants]
        first += [dataclasses.replace(own, counts=more)] if more else []
    others = [_other(step, policy) for policy in settings.policy.instead]
    packed = in_bits(step, budget)
    own_fits = packed is not step and likely_to_fit(step, budget)
    # where bytes do not fit, other forms have nothing to gain from them
    loops = _forms(step if own_fits else packed, budget)
    spare = _forms(packed, budget) if own_fits else []
    carrying = carry_contexts(step)
    loops += [*carrying, *(c for form in carrying for c in loop_contexts(form, budget))]
    first += [_of_loops(context) for context in loops]
    if compresses and 1 in parts.counts:
        compressed = [*compressing_loops(loops, budget)]
        first += map(_of_loops, compressed)
        loops += compressed
    first += _of_tried(step, (step, *loops, *spare), budget, tried)
    moves_at_last = step.transport and step.immovable and "offload" in settings.allowed
    moving = functools.partial(_variant, step, settings.policy, moves=True)
    at_last = Family(parts.counts, moving, settings.splitting, between=parts.between)
    last = [at_last] if moves_at_last else []
    if moves_at_last and settings.splitting is Splitting.FEWEST:
        last = [_by_size(step, last[0], settings.policy, budget, moves=True)]
    last += [_of_loops(context, moves=True) for context in (*loops, *spare) if moves_at_last]
    groups = [first, [_of_loops(context) for context in spare], last]
    searched = not settings.policy.spared(step.traced.captured.program)
    if searched and not step.immovable and "compress" not in settings.named:
        # where they are enough faster than what the bound of the policy's own plans leaves
        groups[0] += [
            dataclasses.replace(
                other,
                splitting=Splitting.FASTEST if len(other.counts) > 1 else Splitting.WHOLE,
                must_gain=PARAMS.time_tolerance,
                bounded_by=own.make,
            )
            for other in others
        ]
    else:
        groups.append(
            [
                _by_size(step, other, policy, budget, moves=bool(step.transport))
                if other.splitting is Splitting.FEWEST
                else other
                for other, policy in zip(others, settings.policy.instead, strict=True)
            ]
        )
    some = ([family for family in group if family.counts] for group in groups)
    return [group for group in some if group]


def _forms(base: StepContext, budget: int | None) -> list[StepContext]:
    """The forms of the step with other logits or stacks, and `base` itself if it packs masks."""
    chunked = logit_contexts(base, budget)
    forms = [base, *chunked] if packs(base) else [*chunked]
    return [*forms, *(c for form in (base, *chunked) for c in loop_contexts(form, budget))]


def _of_loops(context: StepContext, moves: bool | None = None) -> Family:
    """The family of a step whose loops stack other values, planned by the chosen policy."""
    settings = context.settings
    make = functools.partial(_variant, context, settings.policy, moves=moves)
    parts = parts_of(context)
    counts = [1] if context.traced.captured.program.compressed else parts.counts
    return Family(counts, make, settings.splitting, alike=True, between=parts.between)


def _of_tried(
    step: StepContext,
    forms: Sequence[StepContext],
    budget: int | None,
    tried: Sequence[Tried],
) -> list[Family]:
    """The families of `tried` plans that fit, but whose loops stack what no other of `forms` does:
    which forms there are depends on the budget, and an earlier search had another one."""
    own = lambda one: (form_of(one), one.compressed)
    stacks = {own(form.traced.captured.program) for form in forms}
    found = []
    for one in tried:
        fits, plan = budget is None or one.need <= budget, one.plan
        if fits and plan.kept is not None and own(plan) not in stacks:
            stacks.add(own(plan))
            form = _compressed(_formed(step, plan), plan)
            make = functools.partial(_variant, form, step.settings.policy)
            alike = [other.plan for other in tried if own(other.plan) == own(plan)]
            counts = sorted({p.sub_batches for p in alike if p.sub_batch_size is None})
            found.append(Family(counts, make, alike=True))
    return found


def _formed(step: StepContext, plan: Plan) -> StepContext:
    """The form of `step` that `plan` is made for, but for compression."""
    if plan.bits:
        step = with_bits(step)
    if plan.logit_chunks > 1:
        step = with_logits(step, plan.logit_chunks)
    if plan.carried:
        step = with_carry(step, plan.carried)
    if plan.kept is not None:
        step = with_loops(step, plan.kept, plan.segments)
    return step


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
    make = functools.partial(_variant, step, policy, moves=bool(step.transport))
    return Family(counts, make, policy.splitting, between=parts.between)


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
        return _variant(step, policy, count, moves, None if is_even else samples)

    counts, make = by_size(parts, variant, budget)
    return dataclasses.replace(family, counts=counts, make=make)


def _same(variant: Variant, count: int) -> Variant:
    del count
    return variant


def _variant(
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
    if program.logit_chunks > 1:
        name += f", logits in {program.logit_chunks} chunks"
    if program.bits:
        name += ", masks in bits"
    if program.carried:
        name += f", {len(program.carried)} convolutions with what stands around them"
    learn = learner(program, step.devices[0], step.target, step.settings.profile)
    compiles = functools.partial(step.compile, traced)
    variant = Variant(name, program, form.policy, form.costs, compiles, traced)
    return dataclasses.replace(variant, learn=learn) if form.convolves else variant


# -- a plan that is given


def _by_given(step: StepContext, plan: Plan) -> CompiledStep:
    """The step by the user's own `plan`."""
    step = _compressed(_formed(step, plan), plan)
    if step.immovable and not step.transport and parks(step.traced.captured.program, plan):
        raise TechniqueError(f"`{step.settings.name}` cannot offload: {step.immovable}.")
    policy, samples = step.settings.policy, plan.sub_batch_size
    variant = _variant(step, policy, plan.sub_batches, samples=samples)
    budget, plain_need = budget_nbytes(step)
    check_made_for(variant.program, plan)
    if step.target is None:
        try_configurations(variant.program, plan, step.devices[0])
    compiled = variant.compile_plan(plan)
    need, predicted = need_nbytes(compiled), predicted_need(variant.program, plan)
    attempt = Attempt(variant, plan, compiled, need, predicted, variant.costs)
    limit = budget if budget is not None else plan.budget
    if limit is not None and need > limit:
        raise PlanError(
            f"the given plan compiles to {show_nbytes(need)} here, over its budget of "
            f"{show_nbytes(limit)}. Plan again for this machine."
        )
    log = SearchLog(step.settings.name)
    log.add(What.COMPILED, "the given plan", plan.predicted_seconds, need)
    made = variant.origin, limit, plain_need, variant.costs, (attempt,), variant.policy, log
    return CompiledStep(*made)


# -- messages


def _lowest_predicted(budget: int, step: StepContext) -> int | None:
    """The peak, in bytes, that the policy of `step` is predicted to reach, at least down to
    `budget`; None if it cannot be planned."""
    try:
        peaks = []
        for count in {1, parts_of(step).counts[-1]}:
            variant = _variant(step, step.settings.policy, count)
            plan = variant.policy.plan(variant.program, variant.costs, budget)
            peaks.append(plan.minimum_peak if isinstance(plan, Infeasible) else plan.predicted_peak)
        return min(peaks)
    except VmemError:
        return None
