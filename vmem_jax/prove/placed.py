"""placed: a plan that fits as XLA's heap will place it, found before anything is compiled.

A policy plans for the bytes that are live at once, and the heap takes more, plan by plan another
share (`core.heap`). So a plan is made anew, for less, until its heap is within the budget.
"""

from __future__ import annotations

import dataclasses
import time

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import predicted_need
from vmem_jax.core.program import Program
from vmem_jax.errors import BudgetError
from vmem_jax.policy.base import AbstractPolicy

_MOST_PLANS = 5
"""Plans that are made on paper for one compile."""

_AS_FAST = 1.01
"""Of the seconds of a plan that does not fit: one that fits and takes less is good enough."""

_LONG, _LONG_AS_FAST = 1_000, 1.1
"""The same for programs of more steps, of which a plan takes seconds."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A plan, and what it will need.

    Attributes:
      plan: its `budget` is what it was planned for, at or below what it is to fit in.
      need: bytes that it is predicted to need, with XLA's heap.
      seconds: what planning took.
    """

    plan: Plan
    need: int
    seconds: float = 0.0

    def fits(self, budget: int | None) -> bool:
        """Whether it is predicted to need no more than `budget` bytes."""
        return budget is None or self.need <= budget


def planned(program: Program, policy: AbstractPolicy, costs: Costs, goal: int | None) -> Placed:
    """What `policy` plans for `goal` bytes live at once, and what the heap takes for it.

    Raises:
      BudgetError: the policy has no plan with so little live at once.
    """
    start = time.perf_counter()
    plan = policy.plan(program, costs, goal)
    need = predicted_need(program, plan)
    return Placed(plan, need, time.perf_counter() - start)


def lowest_of(program: Program, error: BudgetError) -> Placed | None:
    """The lowest plan that a policy has, by its error; None where nothing can be planned at all."""
    if not isinstance(plan := error.lowest_plan, Plan):
        return None
    return Placed(plan, predicted_need(program, plan))


def placed(
    program: Program,
    policy: AbstractPolicy,
    costs: Costs,
    goal: int | None,
    *,
    first: Placed | None = None,
    before: Placed | None = None,
) -> Placed:
    """The fastest of some plans that are predicted to need at most `goal` bytes as XLA places them,
    or the one that needs the least.

    What the heap takes beside what is live is taken off what is planned for, until it fits, or
    nothing lower can be planned; then halfway back, since another plan may lose less.

    Args:
      first: what the policy plans for `goal`, where that was asked already.
      before: a plan that compiled to too much.

    Raises:
      BudgetError: the policy has no plan with so little live at once.
    """
    if goal is None:
        return first or planned(program, policy, costs, None)
    near = _AS_FAST if len(program.steps) <= _LONG else _LONG_AS_FAST
    target = goal  # what is planned for
    over = within = lowest = None  # planned for, and at last too much or little enough; the least
    if before is not None:
        target -= before.need - before.plan.predicted_peak
        over, fails = goal, before.plan
    tried: list[Placed] = []
    while len(tried) < _MOST_PLANS:
        try:
            one = first if first and not tried else planned(program, policy, costs, target)
        except BudgetError as error:
            if not tried:
                raise
            if lowest or not (lowest := lowest_of(program, error)):
                break
            one, target = lowest, lowest.plan.predicted_peak
        tried.append(one)
        if one.fits(goal):
            within, fits = target, one.plan
        else:
            over, fails = target, one.plan
        if within is None:
            # below the residents no error has a lowest plan
            target = max(goal - (one.need - one.plan.predicted_peak), program.resident_nbytes + 1)
        elif over is None or fits.predicted_seconds <= near * fails.predicted_seconds:
            break
        else:
            target = (over + within) // 2
    fitting = [one for one in tried if one.fits(goal)]
    if fitting:
        best = min(fitting, key=lambda one: one.plan.predicted_seconds)
    else:
        best = min(tried, key=lambda one: one.need)
    return dataclasses.replace(best, seconds=sum(one.seconds for one in tried))
