"""Variants: the forms of a step that the search chooses from."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vmem_jax.core.costs import Costs
from vmem_jax.core.liveness import least_nbytes
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import simulate_plan
from vmem_jax.core.program import Program
from vmem_jax.policy.base import AbstractPolicy, Splitting


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One form of a step, with the functions that plan and compile it.

    Attributes:
      name: for people, "auto in 4 sub-batches".
      program, policy, costs: the arguments of planning.
      compile_plan: Plan -> compiled step.
      origin: the traced step of this form, which plans of several policies may be made for.
      learn: (costs, compiled step) -> costs, corrected by the workspaces of XLA's own convolutions
        that the compiled step shows.
    """

    name: str
    program: Program
    policy: AbstractPolicy
    costs: Costs
    compile_plan: Callable[[Plan], Any]
    origin: Any
    learn: Callable[[Costs, Any], Costs] = lambda costs, compiled: costs

    def lower_bound(self, budget: int | None = None) -> float:
        """A lower bound of the seconds of its plans within `budget` bytes.

        A budget that no plan can meet bounds nothing.
        """
        if budget is not None and least_nbytes(self.program) > budget:
            budget = None
        return self._bound(budget)

    def unhidden_seconds(self, plan: Plan) -> float:
        """An upper bound of the predicted seconds of `plan`: no step runs beside a copy. It is
        infinite where loops stack in host memory."""
        if plan.looped:
            return math.inf
        timeline = simulate_plan(self.program, plan, self.costs)
        return timeline.seconds + sum(c.end - c.begin for both in timeline.copies for c in both)

    @functools.cached_property
    def _bound(self) -> Callable[[int | None], float]:
        bound = functools.partial(self.policy.lower_bound_seconds, self.program, self.costs)
        return functools.cache(bound)  # a linear program, which several families ask for

    @property
    def without_transfers(self) -> Variant:
        """This variant without transfers and with XLA's own convolutions."""
        own = {s: configurations[:1] for s, configurations in self.costs.convolutions.items()}
        costs = dataclasses.replace(self.costs, link=None, convolutions=own)
        return dataclasses.replace(self, name=f"{self.name}, without transfers", costs=costs)


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """Variants that differ only in the number of sub-batches. Each is made when the search needs it.

    Attributes:
      counts: numbers of sub-batches, or sizes, negative, in rising order. No step is faster with more
        of them.
      make: count -> variant.
      splitting: which count is wanted among those that fit.
      must_gain: share of the time by which this family must be faster than others.
      bounded_by: count -> a variant of another family whose lower bounds hold for this one too; None
        for its own.
      alike: its variants differ little from those of other such families, so that XLA takes about as
        much more for them than is predicted.
      between: two numbers of sub-batches -> one between them that is tried, too, if the fastest is
        wanted; 0 if there is none.
      least: count -> bytes that all of its plans need at least, known before the variant is made.
    """

    counts: Sequence[int]
    make: Callable[[int], Variant]
    splitting: Splitting = Splitting.FASTEST
    must_gain: float = 0.0
    bounded_by: Callable[[int], Variant] | None = None
    alike: bool = False
    between: Callable[[int, int], int] = lambda fewer, more: 0
    least: Callable[[int], int] = lambda count: 0


class MadeLater(Sequence[Family]):
    """Families that are made when the search comes to them; at least one.

    Attributes:
      may_gain: whether one of them may be enough faster than plans of so many seconds to be tried
        where these fit, too.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[Family]],
        may_gain: Callable[[float], bool] = lambda seconds: False,
    ) -> None:
        self._make = make
        self.may_gain = may_gain

    @functools.cached_property
    def _made(self) -> list[Family]:
        return [*self._make()]

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]
