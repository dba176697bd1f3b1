"""Candidate: a variant in the queue of the search, with what is known of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from vmem_jax.core.planned import simulate_plan
from vmem_jax.errors import VmemError
from vmem_jax.search.attempt import Attempt
from vmem_jax.search.estimate import Estimate
from vmem_jax.search.record import Record, Tried
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

    def is_compiled_by(self, attempt: Attempt) -> bool:
        """Whether `attempt` is its plan for its form of the step, by any policy."""
        variant, one = self.variant, self.estimate
        assert variant is not None and one is not None
        same = attempt.plan.schedule == one.plan.schedule
        return same and attempt.variant.form is variant.form

    def is_alike(self, attempt: Attempt) -> bool:
        """Whether `attempt` is a plan for the step with other stacks that does the same by prediction:
        as many bytes are live at every step, and each step takes as long. Such are the stacks of the
        step's own loops, once more."""
        variant, one = self.variant, self.estimate
        assert variant is not None and one is not None
        same = variant.program.sub_batches == attempt.variant.program.sub_batches
        same &= (variant.policy.name, one.need) == (attempt.plan.policy, attempt.predicted_need)
        if not same or variant.program.kept == attempt.variant.program.kept:
            return False
        other = simulate_plan(attempt.variant.program, attempt.plan, attempt.variant.costs)
        mine = simulate_plan(variant.program, one.plan, variant.costs)
        return (mine.live_nbytes, mine.start) == (other.live_nbytes, other.start)


def fastest_proved(
    families: Iterable[Family], record: Record, budget: int | None
) -> Candidate | None:
    """The fastest plan of `families` that is known to fit, where no copy is hidden; None for none.

    Its seconds are those of a step that waits for every copy.
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
            found += [
                Candidate(family, count, variant, variant.unhidden_seconds(tried.plan), tried)
                for tried in record.candidates(variant)
                if tried in fitting
            ]
    return min(found, key=lambda one: one.rank, default=None)
