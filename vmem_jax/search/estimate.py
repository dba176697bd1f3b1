"""estimate: finds a plan that is predicted to fit on XLA's heap, before anything is compiled.

A policy plans for the bytes that are live at once. The heap needs more, by a share that differs
between plans (`core.heap`). So the policy plans again for less until the heap is within the budget.
"""

from __future__ import annotations

import dataclasses

from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import predicted_need
from vmem_jax.policy.base import Infeasible
from vmem_jax.search.log import SearchLog
from vmem_jax.search.params import SearchParams
from vmem_jax.search.variant import Variant


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A plan and its predicted need.

    Attributes:
      plan: its `budget` is the goal of the policy, at or below the budget that it must fit.
      need: predicted bytes, with XLA's heap.
      is_lowest: whether it is the plan with the fewest live bytes that the policy has.
      lacks: what the step lacks for the policy to do more; "" for nothing.
    """

    plan: Plan
    need: int
    is_lowest: bool = False
    lacks: str = ""

    @property
    def seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.plan.predicted_seconds

    @property
    def excess(self) -> int:
        """By how many bytes the heap exceeds what is live at once."""
        return self.need - self.plan.predicted_peak

    def fits(self, budget: int | None) -> bool:
        """Whether it is predicted to need no more than `budget` bytes."""
        return budget is None or self.need <= budget


def planned(variant: Variant, goal: int | None, log: SearchLog) -> Estimate:
    """The policy's plan for `goal` live bytes, or else its lowest one, with its need on the heap."""
    found = variant.policy.plan(variant.program, variant.costs, goal)
    log.plans += 1
    if isinstance(found, Infeasible):
        need = predicted_need(variant.program, found.plan)
        return Estimate(found.plan, need, is_lowest=True, lacks=found.lacks)
    return Estimate(found, predicted_need(variant.program, found))


def estimate(
    variant: Variant,
    goal: int | None,
    params: SearchParams,
    log: SearchLog,
    before: Estimate | None = None,
) -> Estimate:
    """The fastest of several plans that are predicted to need at most `goal` bytes on XLA's heap. If
    none does, the plan with the smallest need.

    The excess of the heap over the live bytes is subtracted from the policy's goal until a plan fits
    or nothing lower can be planned. Then the goal is bisected, since another plan may lose less. If
    none fits by little, the policy is asked for less than its lowest plan has: searches end where
    they meet their goal or find no more to drop, so a lower goal may lead to a lower peak.

    Args:
      before: a plan that compiled to too much; its excess is subtracted in the first round. Its
        `budget` is what its policy was asked for; where that was below what the policy reaches, and
        now nothing fits, it is asked for half as much beyond the residents: of plans with the same
        peak another goal moves other values, and the heap may lose less.
    """
    if goal is None:
        return planned(variant, None, log)
    tolerance = 1 + params.plan_tolerance_of(len(variant.program.steps))
    floor = variant.program.resident_nbytes + 1  # what is planned for below it has no other plan
    target = goal
    fits = fails = None  # the policy's goal, in live bytes, and a plan for it that fits or does not
    if before is not None:
        target, fails = max(goal - before.excess, floor), (goal, before)
    found: list[Estimate] = []
    while len(found) < params.plans_per_estimate:
        one = planned(variant, target, log)
        if one.is_lowest:
            if any(each.is_lowest for each in found):
                break
            target = one.plan.predicted_peak
        found.append(one)
        if one.fits(goal):
            fits = target, one
        else:
            fails = target, one
        if fits is None:
            if one.is_lowest:
                break  # nothing lower can be planned
            target = max(goal - one.excess, floor)
        elif fails is None or fits[1].seconds <= tolerance * fails[1].seconds:
            break
        else:
            target = (fits[0] + fails[0]) // 2
    if before is not None and not any(one.fits(goal) for one in found):
        asked = before.plan.budget
        if asked is not None and floor < asked < before.plan.predicted_peak:
            one = planned(variant, (asked + floor) // 2, log)
            found += [one] if one.plan.schedule != before.plan.schedule else []
    least = min(found, key=lambda one: one.need)
    if before is None and not least.fits(goal) and least.fits(int(params.near * goal)):
        lower = max(int(params.below * least.plan.predicted_peak), floor)
        found.append(planned(variant, lower, log))
    fitting = [one for one in found if one.fits(goal)]
    return min(fitting or found, key=lambda one: one.seconds if fitting else one.need)


def refined(
    variant: Variant, goal: int | None, found: Estimate, params: SearchParams, log: SearchLog
) -> Estimate:
    """`found`, or a faster plan that is predicted to need at most `goal` bytes, too.

    A plan for fewer bytes may take less time, and of two plans for about as many one may lose far
    more on the heap. So further goals are tried, spread evenly below `goal`, where recomputation
    takes much of the time. It is for what is compiled next, which takes far longer than a few plans.
    """
    if goal is None or found.seconds <= (1 + params.much_more) * variant.lower_bound():
        return found
    for share in params.spread_of(len(variant.program.steps)):
        one = planned(variant, int(share * goal), log)
        if one.fits(goal):
            found = min(found, one, key=lambda each: each.seconds)
        if one.is_lowest:
            break  # nothing lower can be planned
    return found
