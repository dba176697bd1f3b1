"""candidate: a variant in the queue of the search, with what is known of it."""

from __future__ import annotations

import dataclasses

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
      is_refined: whether its plan is the fastest for several goals.
      waits: whether its variant is not made as long as no plan of it can fit.
    """

    family: Family
    count: int
    variant: Variant | None = None
    seconds: float = 0.0
    estimate: Estimate | None = None
    goal: int | None = None
    misses: tuple[Attempt, ...] = ()
    is_refined: bool = False
    waits: bool = True

    @property
    def rank(self) -> tuple[float, int]:
        """The key of the queue: seconds, then the number of sub-batches. The seconds of a family that
        must be faster by a share are raised by that share."""
        return self.seconds / (1 - self.family.must_gain), self.count

    @property
    def least(self) -> int:
        """Bytes that its plans are predicted to need at least, whatever is known of it."""
        return self.family.least(self.count)

    def made(self) -> Variant:
        """Its variant, which is made if it was not."""
        return self.family.make(self.count) if self.variant is None else self.variant

    @property
    def is_proved(self) -> bool:
        """Whether its plan was compiled by an earlier search, so that its need is known."""
        return isinstance(self.estimate, Tried)

    @property
    def expected(self) -> int:
        """The expected need of its plan in bytes: the prediction plus the excess of the variant's
        last compiled plan, or less what that compiled to below its prediction."""
        assert self.estimate is not None
        off = [one.excess or min(one.need - one.predicted_need, 0) for one in self.misses[-1:]]
        return self.estimate.need + sum(off)
