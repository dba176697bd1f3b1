"""attempt: plans that were compiled: those of one search, and a record of all for later searches.

Every plan that was compiled is a candidate for each budget that it fits. So the minimum peak that an
error names is met when it is asked for, and a larger budget never gives a slower plan.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
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
    """

    variant: Variant
    plan: Plan
    compiled: Any
    need: int
    predicted_need: int
    costs: Costs

    @functools.cached_property
    def excess(self) -> int:
        """`need` minus the prediction with `costs`, in bytes; at least 0."""
        known = predicted_need(self.variant.program, restated(self.plan, self.costs))
        return max(self.need - known, 0)

    def is_alike(self, variant: Variant, one: Estimate) -> bool:
        """Whether it is a plan for the step with other stacks that is predicted to be equal to the
        plan `one` of `variant`: as many bytes are live at every step, and each takes as long. So are
        the stacks of the step's own loops, chosen once more."""
        if self.plan.kept == one.plan.kept or self.predicted_need != one.need:
            return False
        mine, other = self.variant.timeline(self.plan), variant.timeline(one.plan)
        return (mine.live_nbytes, mine.start) == (other.live_nbytes, other.start)


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
      best: the attempt to run; if nothing fits, the one with the smallest need.
      fits: whether `best` is within the budget.
      attempts: all attempts, `best` last; only `best` keeps its compiled step.
    """

    best: Attempt
    fits: bool
    attempts: tuple[Attempt, ...]


@dataclasses.dataclass(frozen=True)
class Tried(Estimate):
    """A plan that was compiled, without a budget. In the record of searches that compile nothing its
    need is the prediction.

    Attributes:
      costs: those that the plan was made from; None if another process made it.
      learned: the same, corrected by what the compiled step shows.
    """

    costs: Costs | None = None
    learned: Costs | None = None

    def corrected(self, costs: Costs) -> Costs:
        """`costs`, corrected by what the compiled step shows of a plan that they made."""
        return costs if self.learned is None or self.costs != costs else self.learned

    def is_of(self, variant: Variant) -> bool:
        """Whether its plan is one for the program of `variant`."""
        plan, program = self.plan, variant.program
        same = plan.program == program.fingerprint and plan.compressed == program.compressed
        return same and form_of(plan) == form_of(program)


class Record:
    """What was tried for one program; threads may share it."""

    def __init__(self) -> None:
        self._tried: dict[Plan, Tried] = {}
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
        """The plans that `variant` may have: of its policy, with transfers only over a link."""
        can_move = variant.costs.link is not None
        return [
            tried
            for tried in self.all()
            if tried.is_of(variant) and tried.plan.policy == variant.policy.name
            if can_move or not tried.plan.moves
        ]

    def of_schedule(self, variant: Variant, plan: Plan) -> Tried | None:
        """The plan that does the same as `plan` of `variant`, by any policy."""
        alike = (t for t in self.all() if t.is_of(variant) and t.plan.schedule == plan.schedule)
        return next(alike, None)
