"""planner: plans and compiles a traced step by the settings of `jit`."""

from __future__ import annotations

import dataclasses
import functools

from absl import logging

from vmem_jax.api import corrections, named_peaks
from vmem_jax.api.entry import CompiledStep
from vmem_jax.api.failure import budget_error
from vmem_jax.api.families import PARTS_DO_NOT, form_for, groups_of, variant_of
from vmem_jax.api.garbage import uncollected
from vmem_jax.api.helps import helps_of
from vmem_jax.api.notices import notices
from vmem_jax.api.records import record_of
from vmem_jax.conv.verify import try_configurations
from vmem_jax.core.need import need_nbytes
from vmem_jax.core.parked import parks
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import predicted_need
from vmem_jax.core.validate import check_made_for
from vmem_jax.devices.device import limit_nbytes
from vmem_jax.errors import PlanError, TechniqueError, VmemError, show_nbytes
from vmem_jax.logs import warn_once
from vmem_jax.policy import Keep
from vmem_jax.policy.base import Infeasible
from vmem_jax.progress import doing
from vmem_jax.search.attempt import Attempt, Compiles, Found, Record, Tried
from vmem_jax.search.log import SearchLog, What
from vmem_jax.search.params import DEFAULT as PARAMS
from vmem_jax.search.params import SearchParams
from vmem_jax.search.search import Search
from vmem_jax.techniques import TECHNIQUES, StepContext
from vmem_jax.techniques.settings import Settings
from vmem_jax.techniques.sub_batches import parts_of

_ALWAYS_SAID = ("offload", "sub_batches")
"""Techniques whose absence is worth a line also where the user names no technique."""


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
        log.add(What.SKIPPED, "compress", why=PARTS_DO_NOT if best.plan.sub_batches > 1 else why)
    need, compiles = show_nbytes(best.need), len(found.attempts)
    logging.info("%s: %s needs %s, after %d compiles", settings.name, best.plan, need, compiles)
    whole = functools.partial(variant_of, step, settings.policy, 1)
    for text in notices(step, best, budget, plain_need, whole, PARAMS):
        warn_once(settings.name, text)
    policy = best.variant.policy
    origin = dataclasses.replace(best.variant.origin, plain=step.traced.plain)
    made = origin, budget, plain_need, best.costs, found.attempts, policy, log
    return CompiledStep(*made, rivals=found.rivals)


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
        # plans that were made before something was timed have other seconds
        timed = tuple(sorted(corrections.known(step).items()))
        record = record_of(program, (settings, step.target, step.inlined, timed))
        for plan, need in () if record.all() else named_peaks.known(step):
            record.add(Tried(plan, need))
    groups = groups_of(step, budget, log, record.all())
    untouched = None if step.traced.hosted else variant_of(step, Keep(), 1)
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


# -- a plan that is given


def _by_given(step: StepContext, plan: Plan) -> CompiledStep:
    """The step by the user's own `plan`."""
    budget, plain_need = budget_nbytes(step)  # before: shares are of the step as it was given
    step = form_for(step, plan)
    if step.immovable and not step.transport and parks(step.traced.captured.program, plan):
        raise TechniqueError(f"`{step.settings.name}` cannot offload: {step.immovable}.")
    policy, samples = step.settings.policy, plan.sub_batch_size
    count = 1 if plan.opened else plan.sub_batches
    variant = variant_of(step, policy, count, samples=samples)
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
            variant = variant_of(step, step.settings.policy, count)
            plan = variant.policy.plan(variant.program, variant.costs, budget)
            peaks.append(plan.minimum_peak if isinstance(plan, Infeasible) else plan.predicted_peak)
        return min(peaks)
    except VmemError:
        return None
