"""attempt: a plan that was compiled, and what a search found."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.policy.base import Infeasible
from vmem_jax.search.variant import Variant


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
      plan_seconds: the seconds that planning took.
      excess: `need` minus the prediction with `costs`, in bytes; at least 0.
    """

    variant: Variant
    plan: Plan
    compiled: Any
    need: int
    predicted_need: int
    costs: Costs
    plan_seconds: float = 0.0
    excess: int = 0

    @property
    def transport(self) -> Any:
        """The `AbstractTransport` of the plan's transfers; None if it has none."""
        return getattr(self.compiled, "transport", None)


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
      best: the attempt to run. If nothing fits, the one with the smallest need; None if nothing was
        compiled.
      fits: whether `best` is within the budget.
      attempts: all attempts, `best` last; only `best` keeps its compiled step.
      failure: if nothing was compiled, the lowest `Infeasible` of all policies.
    """

    best: Attempt | None
    fits: bool
    attempts: tuple[Attempt, ...]
    failure: Infeasible | None = None


def need_nbytes(compiled: Any) -> int:
    """Bytes of device memory that a compiled step needs.

    `peak_memory_in_bytes` is not used: on some backends it counts host buffers, and on the CPU it
    omits the temporaries.
    """
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
