"""recompute: drops values when memory runs out and recomputes them when they are read.

Source: Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, arXiv:2006.09616, section 3
(the heuristic h); Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174 (√n on a chain).

Differs from the paper:
1. It is simulated before the step is compiled, with every later use known, so staleness is the time
   until the next use (Belady), and what is evicted costs nothing after its last use.
2. Costs are a roofline's seconds, not measured ones.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import simulate
from vmem_jax.policy.base import AbstractPolicy, Infeasible, finish
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.min_peak import lowest
from vmem_jax.policy.order import lower_order
from vmem_jax.policy.transfer_schedule import rank


@dataclasses.dataclass(frozen=True)
class Recompute(AbstractPolicy):
    """Drops values by DTR's heuristic with known next uses, under one limit for the whole step."""

    name: ClassVar[str] = "recompute"

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        base = lower_order(program, costs)
        keeps = simulate(program, base, costs)
        if budget is None:
            return finish(self.name, program, keeps, budget)
        under = lambda n: simulate(program, Execution(program, costs, base, limit=n).order, costs)
        # a limit below the budget is tried too: what it frees early may be dropped cheaper
        tried = map(under, (budget, budget - (budget - program.resident_nbytes) // 10))
        best = min([keeps, *tried], key=lambda timeline: rank(timeline, budget))
        if best.peak > budget:
            best = min([best, lowest(program, keeps, under)], key=lambda t: rank(t, budget))
        return finish(self.name, program, best, budget)
