"""state: what a search knows at a moment, and what follows from that."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from vmem_jax.errors import VmemError
from vmem_jax.policy.base import Splitting
from vmem_jax.search.attempt import Attempt, Compiles, Found, Record
from vmem_jax.search.candidate import Candidate
from vmem_jax.search.estimate import Estimate
from vmem_jax.search.log import SearchLog
from vmem_jax.search.params import DEFAULT, SearchParams
from vmem_jax.search.variant import Family, Variant


@dataclasses.dataclass
class State:
    """The state of one search, and what follows from it; up to `compiles` it is given.

    Attributes:
      budget: bytes, or None for no limit.
      untouched: the step as plain jit runs it, if the search may choose that.
      may_stay: whether the untouched step is as good as any plan that is no faster; if not, it is
        taken only where nothing else fits.
      record: plans of this program whose need is known; those that are compiled are added.
      compiles: which plans are compiled.
      earlier: what the record had before.
      groups: those that are not queued yet.
      queue: (rank, order of arrival, candidate).
      over: candidates with the lowest plan that is known, which does not fit.
      waiting: candidates whose variants are not made, since none of their plans can fit.
      attempts: what was compiled, each with its candidate.
      known: plans of the record that need more than the budget.
      opened: the variants that were queued, as family and number of sub-batches.
      lacks: for each time that a policy was asked, what the step lacks for it to do more.
      reasons: why candidates were dropped.
      rivals: candidates that can be faster than the incumbent, but not by the tolerance.
      best: the incumbent.
    """

    budget: int | None
    untouched: Variant | None = None
    may_stay: bool = False
    params: SearchParams = DEFAULT
    log: SearchLog = dataclasses.field(default_factory=SearchLog)
    record: Record = dataclasses.field(default_factory=Record)
    compiles: Compiles = Compiles.ALL
    earlier: Record = dataclasses.field(default_factory=Record)
    groups: list[Sequence[Family]] = dataclasses.field(default_factory=list)
    queue: list[tuple[tuple[float, int], int, Candidate]] = dataclasses.field(default_factory=list)
    over: list[Candidate] = dataclasses.field(default_factory=list)
    waiting: list[Candidate] = dataclasses.field(default_factory=list)
    lacks: list[str] = dataclasses.field(default_factory=list)
    reasons: list[VmemError] = dataclasses.field(default_factory=list)
    rivals: list[Candidate] = dataclasses.field(default_factory=list)
    attempts: dict[Attempt, Candidate] = dataclasses.field(default_factory=dict)
    known: list[Attempt] = dataclasses.field(default_factory=list)
    opened: list[tuple[Family, int]] = dataclasses.field(default_factory=list)
    best: Attempt | None = None
    arrivals: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def found(self, best: Attempt) -> Found:
        """`best`, and the others without their compiled steps, which hold memory."""
        others = (dataclasses.replace(a, compiled=None) for a in self.attempts if a is not best)
        makes = tuple(one.made for one in self.rivals)
        return Found(best, self.fits(best), (*others, best), makes)

    @property
    def limit(self) -> float:
        """Bytes, infinite without a budget."""
        return math.inf if self.budget is None else self.budget

    @property
    def spare(self) -> int:
        """Compiles that are left; one belongs to the untouched step, which bounds the lowest peak."""
        kept = self.best is None and self.plain is not None
        return self.params.max_compiles - len(self.attempts) - kept

    @property
    def missed(self) -> list[Attempt]:
        """What is known to need too much."""
        return [*(one for one in self.attempts if not self.fits(one)), *self.known]

    @property
    def least(self) -> float:
        """Bytes of the smallest plan that is known to need too much."""
        return min((one.need for one in self.missed), default=math.inf)

    def excess_of_others(self, candidate: Candidate) -> int:
        """The lowest excess of similar variants that need too much, until its own is known: of other
        families with as many sub-batches, and of its own with any other number of them."""
        own = candidate.family

        def is_similar(other: Candidate) -> bool:
            if own is other.family:
                return min(candidate.count, other.count) > 1
            return other.family.alike and other.count == candidate.count

        if candidate.misses or not own.alike:
            return 0
        over = ((a, other) for a, other in self.attempts.items() if not self.fits(a))
        return min((a.excess for a, other in over if is_similar(other)), default=0)

    def is_far_off(self, candidate: Candidate) -> bool:
        """Whether each compiled plan of its policy came to more than `far` times its prediction."""
        assert candidate.variant is not None
        policy = candidate.variant.policy.name
        others = [a for a in self.attempts if a.variant.policy.name == policy]
        far = [a.need > self.params.far * a.predicted_need for a in others]
        return bool(far) and all(far)

    def fits(self, attempt: Attempt) -> bool:
        return attempt.need <= self.limit

    def push(self, candidate: Candidate, **changes: Any) -> None:
        """Queues a candidate with these fields changed."""
        candidate = dataclasses.replace(candidate, **changes)
        heapq.heappush(self.queue, (candidate.rank, next(self.arrivals), candidate))

    def open(self, family: Family, count: int, seconds: float) -> None:
        """Queues the variant of `family` in `count` sub-batches, once; its bound is `seconds`."""
        if (family, count) not in self.opened:
            self.opened.append((family, count))
            self.push(Candidate(family, count, seconds=seconds, goal=self.budget))

    def open_next(self, candidate: Candidate, wanted: Splitting, seconds: float = 0.0) -> None:
        """Queues the next number of sub-batches of a family that wants the one that is `wanted`; its
        bound is `seconds`."""
        family = candidate.family
        later = [count for count in family.counts if count > candidate.count]
        if later and family.splitting is wanted:
            self.open(family, later[0], seconds)

    def missed_with(self, variant: Variant, one: Estimate) -> Attempt | None:
        """What missed with this plan for this form of the step, by any policy."""
        schedule = one.plan.schedule
        same = (a for a in self.missed if a.variant.origin is variant.origin)
        return next((a for a in same if a.plan.schedule == schedule), None)

    @property
    def plain(self) -> Variant | None:
        """The untouched step, unless it is known what it needs, and that this is too much."""
        is_known = any(one.variant is self.untouched for one in self.missed)
        return None if is_known else self.untouched
