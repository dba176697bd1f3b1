"""attempt: plans that were compiled: those of one search, and a record of all for later searches.

Every plan that was compiled is a candidate for each budget that it fits. So the minimum peak that an
error names is met when it is asked for, and a larger budget never gives a slower plan.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan, form_of
from vmem_jax.core.planned import predicted_need, restated
from vmem_jax.search.estimate import Estimate
from vmem_jax.search.variant import Variant

_PLANS = 32
"""Plans of each program: the one with the lowest need and the latest ones. A sweep compiles about as
many."""


class Compiles(enum.Enum):
    """Which plans a search compiles; the others need what the record or the prediction says.

    ALL: every plan that the search may choose.
    UNTRIED: those that the record does not have, so the one that is found may have no compiled step.
    NONE: no plan.
    """

    ALL = enum.auto()
    UNTRIED = enum.auto()
    NONE = enum.auto()


@dataclasses.dataclass(frozen=True, eq=False)
class Attempt:
    """A plan that was compiled.

    Attributes:
      variant: the variant of the plan.
      plan: the plan; its `budget` is the user's.
      compiled: the compiled step; None once another plan is chosen.
      need: bytes, arguments + outputs − aliased + temporaries, as the compiler counts them.
      predicted_need: the prediction of `need`, with XLA's heap.
      costs: the costs that the plan was made from, corrected by what the compiled step shows.
      asked: bytes that the policy was asked for; None where that is not known.
    """

    variant: Variant
    plan: Plan
    compiled: Any
    need: int
    predicted_need: int
    costs: Costs
    asked: int | None = None

    @property
    def estimate(self) -> Estimate:
        """What its plan was before it was compiled."""
        return Estimate(dataclasses.replace(self.plan, budget=self.asked), self.predicted_need)

    @functools.cached_property
    def excess(self) -> int:
        """`need` minus the prediction with `costs`, in bytes; at least 0."""
        known = predicted_need(self.variant.program, restated(self.plan, self.costs))
        return max(self.need - known, 0)

    def measure_for(self, policy: str) -> int:
        """Bytes to compare what is predicted for plans of `policy` with: `need`; for another one than
        its own what was predicted, if that is more, since their predictions are as much too high."""
        other = policy != self.variant.policy.name and self.plan.fenced
        return max(self.need, self.predicted_need) if other else self.need


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
      best: the attempt to run; if nothing fits, the one with the smallest need.
      fits: whether `best` is within the budget.
      attempts: all attempts, `best` last; only `best` keeps its compiled step.
      rivals: variants whose plans may be faster than `best`, but not by the tolerance; those that may
        be fastest first. Calling one makes it.
    """

    best: Attempt
    fits: bool
    attempts: tuple[Attempt, ...]
    rivals: tuple[Callable[[], Variant], ...] = ()


@dataclasses.dataclass(frozen=True)
class Tried(Estimate):
    """A plan that was compiled, without a budget. In the record of searches that compile nothing its
    need is the prediction."""


class Record:
    """What was tried for one program; threads may share it."""

    def __init__(self, tried: Iterable[Tried] = ()) -> None:
        self._tried = {one.plan: one for one in tried}
        self._lock = threading.Lock()

    def add(self, tried: Tried) -> None:
        """Adds a plan, or what it needs now."""
        with self._lock:
            self._tried[tried.plan] = tried
            if len(self._tried) > _PLANS:
                lowest = min(self._tried.values(), key=lambda one: one.need)
                del self._tried[next(p for p in self._tried if p is not lowest.plan)]

    def all(self) -> list[Tried]:
        """All that was tried, the latest last."""
        with self._lock:
            return [*self._tried.values()]

    def candidates(self, variant: Variant) -> list[Tried]:
        """The plans for the program of `variant` that it may have: of its policy, with transfers only
        over a link."""
        program, can_move = variant.program, variant.costs.link is not None
        own = program.fingerprint, program.compressed, form_of(program), variant.policy.name
        of = lambda plan: (plan.program, plan.compressed, form_of(plan), plan.policy)
        return [t for t in self.all() if of(t.plan) == own and (can_move or not t.plan.moves)]
