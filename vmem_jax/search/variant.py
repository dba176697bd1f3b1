"""Variants: the forms of a step that the search chooses from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program
from vmem_jax.policy.base import AbstractPolicy, Splitting


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One form of a step: what plans it, and what compiles its plans.

    Attributes:
      name: for people, "auto in 4 sub-batches".
      program, policy, costs: what plans are made from.
      compile_plan: Plan -> compiled step.
      learn: (costs, compiled step) -> costs with what that step shows of XLA's own convolutions.
      origin: the traced step of this form, for whoever runs the plan.
    """

    name: str
    program: Program
    policy: AbstractPolicy
    costs: Costs
    compile_plan: Callable[[Plan], Any]
    learn: Callable[[Costs, Any], Costs] = lambda costs, compiled: costs
    origin: Any = None

    def lower_bound(self, budget: int | None = None) -> float:
        """Seconds that no plan of it goes below, within `budget` bytes."""
        if budget not in self._bounds:  # a linear program, which several families ask for
            found = self.policy.lower_bound_seconds(self.program, self.costs, budget)
            self._bounds[budget] = found
        return self._bounds[budget]

    @functools.cached_property
    def _bounds(self) -> dict[int | None, float]:
        return {}

    @functools.cached_property
    def without_transfers(self) -> Variant:
        """The same where nothing moves and every convolution is XLA's own."""
        own = {s: configurations[:1] for s, configurations in self.costs.convolutions.items()}
        costs = dataclasses.replace(self.costs, link=None, convolutions=own)
        return dataclasses.replace(self, name=f"{self.name}, without transfers", costs=costs)


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """Variants that differ in the number of sub-batches alone; each is made when it is looked at.

    Attributes:
      counts: numbers of sub-batches, in rising order. With more of them no step gets faster.
      make: the variant with so many.
      splitting: which of those that fit is wanted.
      must_gain: share of the time by which it must be faster than other families.
      bounded_by: the variant of another family, with so many sub-batches, whose lower bounds hold
        for this one, too; by default its own do.
      margin: share of the budget by which the first plan of a variant may be predicted to need more.
      proved: plans of this family that were compiled before, and the bytes that they need.
    """

    counts: Sequence[int]
    make: Callable[[int], Variant]
    splitting: Splitting = Splitting.FASTEST
    must_gain: float = 0.0
    bounded_by: Callable[[int], Variant] | None = None
    margin: float = 0.0
    proved: Sequence[tuple[Plan, int]] = ()
