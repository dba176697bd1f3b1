"""keep: leaves the program untouched, so XLA decides everything."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import simulate
from vmem_jax.policy.base import AbstractPolicy, Infeasible, finish


@dataclasses.dataclass(frozen=True)
class Keep(AbstractPolicy):
    """Leaves the program untouched: the baseline of every comparison."""

    name: ClassVar[str] = "keep"

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        timeline = simulate(program, range(len(program.steps)), costs)
        return finish(self.name, program, timeline, budget, fenced=False)
