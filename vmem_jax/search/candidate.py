"""Candidate: a variant in the queue of the search, with what is known of it."""

from __future__ import annotations

import dataclasses

from vmem_jax.policy.base import Splitting
from vmem_jax.search.attempt import Attempt, Tried
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

    def is_like(self, other: Candidate) -> bool:
        """Whether XLA is expected to take about as much more than predicted for both."""
        both = self.family.alike and other.family.alike and self.family is not other.family
        return both and self.count == other.count


def unchanged(untouched: Variant) -> Candidate:
    """The step as plain jit runs it."""
    return Candidate(Family((1,), lambda count: untouched, Splitting.WHOLE), 1, untouched)
