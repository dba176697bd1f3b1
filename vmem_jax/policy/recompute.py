"""recompute: what does not fit is dropped when memory runs out and made again when it is read.

Source: Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, arXiv:2006.09616, section 3
(the heuristic h); Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174 (√n on a chain).

Differs from the paper:
1. It runs on paper before the step is compiled, with every later use known, so staleness is the time
   until the next use (Belady), and a victim is free from its last use on.
2. Costs are a roofline's seconds, not measured ones.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program
from vmem_jax.policy.base import AbstractPolicy, best_of, finish
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.lowest import lowest
from vmem_jax.policy.order import lower_order


@dataclasses.dataclass(frozen=True)
class Recompute(AbstractPolicy):
    """Drops by DTR's heuristic with known future, under one limit for the whole step."""

    name: ClassVar[str] = "recompute"

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan:
        base = lower_order(program, costs)
        orders: list[tuple[int, ...]] = [base]
        if budget is not None:
            # a limit below the budget is tried too: what it frees early may be dropped cheaper
            for limit in (budget, budget - (budget - program.resident_nbytes) // 10):
                orders.append(tuple(Execution(program, costs, base, limit=limit).order))
        best = best_of(program, costs, orders, budget)
        if budget is not None and best.peak > budget:
            best = min(best, lowest(program, costs, base), key=lambda timeline: timeline.peak)
        return finish(self.name, program, best, budget)
