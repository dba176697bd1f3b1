"""record: the plans of a program that were tried, with what they need, for later searches.

Every plan that was compiled is a candidate for each budget that it fits. So the minimum peak that an
error names is met when it is asked for, and a larger budget never gives a slower plan.
"""

from __future__ import annotations

import dataclasses
import threading

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.search.estimate import Estimate
from vmem_jax.search.variant import Variant

_PLANS = 32
"""Plans of each program: the one with the lowest need and the latest ones. A sweep compiles about as
many."""


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
        # programs of other forms of a step may be equal, of another jaxpr
        form = lambda one: (one.compressed, one.kept, one.segments, one.logit_chunks, one.carried)
        same = self.plan.program == variant.program.fingerprint
        return same and form(self.plan) == form(variant.program)


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
