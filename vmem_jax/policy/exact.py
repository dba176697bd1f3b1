"""exact: the canonical order and exactly the residuals that the backward pass needs.

Nothing is recomputed but what a fusion computes for itself. Plain jit holds whatever its fusions
write, often several copies of a value; this policy holds each residual once.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import simulate
from vmem_jax.policy.base import AbstractPolicy, Infeasible, finish
from vmem_jax.policy.order import lower_order


@dataclasses.dataclass(frozen=True)
class Exact(AbstractPolicy):
    """Order and exact residuals only: results are bitwise those of the plain step."""

    name: ClassVar[str] = "exact"

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        timeline = simulate(program, lower_order(program, costs), costs)
        return finish(self.name, program, timeline, budget)
