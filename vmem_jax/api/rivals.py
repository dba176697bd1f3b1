"""rivals: the plans that `tune` times beside the one that the search chose.

First those that the search left because they are not predicted to be faster by more than its
tolerance, as far as they are not predicted to be slower by more than the error of predictions. Then,
if the first plan took another time than predicted, the plan by costs that are corrected by it. Then
the fastest of all with other options of the compiler, whose effect nothing predicts: other kernels
for products.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from absl import logging

from vmem_jax import jax_compat as compat
from vmem_jax.api.entry import CompiledStep
from vmem_jax.capture.primitives import has
from vmem_jax.compiler.compile import is_chosen
from vmem_jax.core.costs import Costs
from vmem_jax.core.need import need_nbytes
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import simulate_plan
from vmem_jax.core.tuning import agree
from vmem_jax.errors import VmemError
from vmem_jax.policy.base import Infeasible
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.search.attempt import Attempt
from vmem_jax.search.estimate import Estimate, estimate
from vmem_jax.search.log import SearchLog
from vmem_jax.search.params import DEFAULT as PARAMS
from vmem_jax.search.search import Search
from vmem_jax.search.variant import Family, Variant
from vmem_jax.techniques import StepContext

MOST_CLOSE = 2
"""Plans of the search that are timed: with more of them each gains less, and takes a compile."""

LEAST_ERROR = 0.05
"""Of predicted seconds: without a profile they are off by 3.4 % in the median (docs/papers.md)."""


class Rival(NamedTuple):
    """A compiled plan, and its name for people."""

    what: str
    attempt: Attempt


def rivals_of(
    step: StepContext, entry: CompiledStep, measured: float, fastest: Callable[[], Attempt]
) -> Iterator[Rival]:
    """Other plans for `entry`, each compiled within its budget when it is asked for.

    Args:
      measured: seconds of one call of the first plan.
      fastest: the plan that was measured to be the fastest so far.
    """
    first, given = entry.best, step.settings
    fits = lambda made: made is not None and _fits(entry, fastest(), made, given.host_budget)
    count = 0
    for made in _close(entry):
        if fits(made) and count < MOST_CLOSE:
            count += 1
            yield Rival(made.variant.name, made)
        if count == MOST_CLOSE:
            break
    predicted = predicted_seconds(first)
    if abs(measured / predicted - 1) > LEAST_ERROR:
        costs = agree(first.variant.program, first.costs, first.plan, measured)
        again = replan(first, entry.budget, costs)
        if again is not None and fits(again):
            yield Rival("planned again from the measurement", again)
    for others in compat.OTHER_OPTIONS.get(step.platform, ()):
        other = with_options(fastest(), step, others)
        if other is not None and fits(other):
            yield Rival(others.what, other)


def predicted_seconds(attempt: Attempt) -> float:
    """The prediction for the plan of `attempt`, by its costs."""
    return simulate_plan(attempt.variant.program, attempt.plan, attempt.costs).seconds


def _close(entry: CompiledStep) -> Iterator[Attempt]:
    """The plans that the search left, as slow as the chosen one within the error of predictions."""
    chosen = entry.best
    error = max(entry.costs.error or 0.0, LEAST_ERROR)
    most = (1 + error) * chosen.plan.predicted_seconds
    done, asked = {chosen.plan.schedule}, set[Variant]()
    for make in entry.rivals:
        with contextlib.suppress(VmemError):  # of a form that cannot be planned or compiled here
            variant = make()
            if variant in asked or variant.lower_bound(entry.budget) > most:
                continue
            asked.add(variant)
            one = estimate(variant, entry.budget, PARAMS, SearchLog())
            can = one.fits(entry.budget) and one.seconds <= most
            if can and one.plan.schedule not in done:
                done.add(one.plan.schedule)
                yield _compiled(variant, one, entry.budget)


def _compiled(variant: Variant, one: Estimate, budget: int | None) -> Attempt:
    plan = dataclasses.replace(one.plan, budget=budget)
    compiled = variant.compile_plan(plan)
    costs = variant.learn(variant.costs, compiled)
    return Attempt(variant, plan, compiled, need_nbytes(compiled), one.need, costs)


def replan(first: Attempt, budget: int | None, costs: Costs) -> Attempt | None:
    """A compiled plan by the policy of `first` with `costs`; None unless it is faster by these."""
    program, now = first.variant.program, first.plan
    seconds = simulate_plan(program, now, costs).seconds
    made = {} if first.compiled is None else {now.schedule: first.compiled}
    compiles = lambda plan: made.get(plan.schedule) or first.variant.compile_plan(plan)
    variant = dataclasses.replace(first.variant, costs=costs, compile_plan=compiles)
    planned = variant.policy.plan(program, costs, budget)
    if isinstance(planned, Infeasible) or planned.predicted_seconds >= seconds:
        return None
    found = Search(budget).run([[Family((1,), lambda count: variant)]])
    best = found.best
    if not found.fits:  # by these costs the policy's plans all end too high
        return None
    if best.plan.schedule == now.schedule or best.plan.predicted_seconds >= seconds:
        return None
    # the variant must not hold the first plan's compiled step, which goes if this one is faster
    return dataclasses.replace(best, variant=first.variant)


def with_options(
    attempt: Attempt, step: StepContext, others: compat.OtherOptions
) -> Attempt | None:
    """The plan of `attempt` with `others`; None where the user chose one of them, or the step has not
    their operation."""
    given = step.settings.compiler_options
    if is_chosen(others.options, given) or not has(step.traced.plain, others.primitive):
        return None
    every = {**dict(attempt.plan.options), **others.options}
    plan: Plan = dataclasses.replace(attempt.plan, options=tuple(every.items()))
    compiled = attempt.variant.compile_plan(plan)
    return dataclasses.replace(attempt, plan=plan, compiled=compiled, need=need_nbytes(compiled))


def _fits(entry: CompiledStep, best: Attempt, other: Attempt, host_budget: int | None) -> bool:
    """Whether `other` needs no more than the budget, and its host memory is there beside that of
    `best`: while they are compared both have theirs."""
    if entry.budget is not None and other.need > entry.budget:
        return False
    layout = lambda one: layout_of(one.variant.program, one.plan).nbytes
    parked = sum(layout(one) for one in (best, other) if one.plan.moves)
    if host_budget is not None and parked > host_budget:
        logging.info("two plans would take %d bytes of host memory at once", parked)
        return False
    return True
