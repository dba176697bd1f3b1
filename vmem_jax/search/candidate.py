"""Candidate: a variant in the queue of the search, with what is known of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from vmem_jax.errors import VmemError
from vmem_jax.policy.base import Splitting
from vmem_jax.search.attempt import Attempt, Record, Tried
from vmem_jax.search.estimate import Estimate
from vmem_jax.search.variant import Family, Variant


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A variant with what is known of it.

    Attributes:
      family, count: the variant's family and number of sub-batches.
      variant: the variant; None until it is bounded.
      seconds: the lower bound of its plans, or the predicted seconds of its plan.
      estimate: its plan, once there is one.
      goal: the most bytes that its plan may be predicted to need.
      misses: its plans that compiled to too much.
    """

    family: Family
    count: int
    variant: Variant | None = None
    seconds: float = 0.0
    estimate: Estimate | None = None
    goal: int | None = None
    misses: tuple[Attempt, ...] = ()

    @property
    def rank(self) -> tuple[float, int]:
        """The key of the queue: seconds, then the number of sub-batches. The seconds of a family that
        must be faster by a share are raised by that share."""
        return self.seconds / (1 - self.family.must_gain), self.count

    @property
    def is_proved(self) -> bool:
        """Whether its plan was compiled by an earlier search, so that its need is known."""
        return isinstance(self.estimate, Tried)

    @property
    def expected(self) -> float:
        """The expected need of its plan in bytes: the prediction plus the excess of the variant's
        last compiled plan, or less what that compiled to below its prediction."""
        if self.estimate is None:
            return math.inf
        off = [one.excess or min(one.need - one.predicted_need, 0) for one in self.misses[-1:]]
        return self.estimate.need + sum(off)

    def goal_by(self, attempts: Mapping[Attempt, Candidate], budget: int | None) -> int | None:
        """A lower goal if its plan needs too much with the lowest excess of similar variants that
        missed the budget; else None."""
        if not self.family.alike or self.misses:
            return None  # it is like no other, or what its plan needs is known
        of_others = [
            attempt.excess
            for attempt, other in attempts.items()
            if not (budget is None or attempt.need <= budget)
            if other.family.alike and other.family is not self.family and other.count == self.count
        ]
        if not of_others:
            return None
        assert budget is not None and self.estimate is not None
        goal = budget - min(of_others)
        is_new = self.goal is None or self.goal > goal
        return goal if is_new and not self.estimate.fits(goal) else None


def proved(
    families: Iterable[Family], record: Record, budget: int, tolerance: float
) -> list[Candidate]:
    """The plans of `families` that are known to fit.

    Their seconds are those of a step that waits for every copy, raised by `tolerance`: a plan of
    other families that takes longer is worse, whatever hides copies.
    """
    fitting = [tried for tried in record.all() if tried.fits(budget) and not tried.plan.looped]
    policies = {tried.plan.policy for tried in fitting}
    found = []
    for family in families if fitting else ():
        for count in family.counts:
            try:
                variant = family.make(count)
            except VmemError:
                break
            if variant.policy.name not in policies:
                break
            for tried in record.candidates(variant):
                if tried in fitting:
                    seconds = variant.unhidden_seconds(tried.plan) / (1 - tolerance)
                    found.append(Candidate(family, count, variant, seconds, tried))
    return found


def unchanged(untouched: Variant) -> Candidate:
    """The step as plain jit runs it."""
    return Candidate(Family((1,), lambda count: untouched, Splitting.WHOLE), 1, untouched)
