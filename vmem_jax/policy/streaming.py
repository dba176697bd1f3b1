"""streaming: adds the transfers of hosted inputs and outputs to the plan of any policy.

The policy plans as if hosted buffers were present when used, at no cost. Then each fetch is scheduled
as late and each offload as early as compute hides it, together with the policy's own transfers. If
the buffers of copies in flight exceed the budget, the policy plans again for that much less.

Nothing moves within the loop over sub-batches, where it would move once for each of them: what is
read there is fetched before the loop, and results leave after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from vmem_jax.core.costs import Costs, Link
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.planned import planned_costs, planned_program
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.policy.base import AbstractPolicy, Infeasible, infeasible
from vmem_jax.policy.executor import Away
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.transfer_schedule import stream


@dataclasses.dataclass(frozen=True)
class Streaming(AbstractPolicy):
    """`inner` with the transfers of hosted inputs and outputs.

    Attributes:
      inner: the policy that plans the rest.
      link: the link of hosted buffers.
      moves: whether `inner` may move buffers too.
    """

    name: ClassVar[str] = "streaming"
    inner: AbstractPolicy
    link: Link
    moves: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.inner.name)  # errors speak of the user's policy

    def spared(self, program: Program) -> str:
        return self.inner.spared(program)

    def lower_bound_seconds(self, program: Program, costs: Costs, budget: int | None) -> float:
        """The bound of `inner`: hosted buffers take more memory and no less time."""
        return self.inner.lower_bound_seconds(program, self._inner_costs(costs), budget)

    def _inner_costs(self, costs: Costs) -> Costs:
        """The costs that `inner` plans with."""
        return costs if self.moves else dataclasses.replace(costs, link=None)

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        """The plan of `inner` with the transfers of hosted buffers, under the name of `inner`."""
        inner_costs = self._inner_costs(costs)
        if not program.hosted:
            return _fenced(self.inner.plan(program, inner_costs, budget), program.is_streamed)
        target = budget
        for _ in range(PARAMS.streaming_tries):
            found = self.inner.plan(program, inner_costs, target)
            inner = found.plan if isinstance(found, Infeasible) else found
            if inner is None:
                return found
            plan, timeline = self._streamed(program, inner, costs, budget)
            if budget is None or target is None or timeline.peak <= budget:
                return plan
            if isinstance(found, Infeasible):
                break
            target -= timeline.peak - budget
        assert budget is not None, "without a budget the first plan is taken"
        return infeasible(plan.policy, planned_program(program, plan), timeline, budget, plan)

    def _streamed(
        self, program: Program, plan: Plan, costs: Costs, budget: int | None
    ) -> tuple[Plan, Timeline]:
        """`plan` with the transfers of hosted buffers; its own transfers are scheduled again."""
        away = [Away(t.buffer, t.start, t.back) for t in plan.transfers]
        limit = sum(b.nbytes for b in program.buffers) if budget is None else budget
        costs = dataclasses.replace(costs, link=self.link)
        costs = planned_costs(program, plan, costs)
        program = planned_program(program, plan)
        timeline = stream(program, plan.order, away, costs, limit)
        if program.sub_batches > 1:
            outside = _outside(program, plan.order, timeline.transfers)
            timeline = simulate(program, plan.order, costs, outside)
        streamed = dataclasses.replace(
            plan,
            fenced=True,
            budget=budget,
            predicted_peak=timeline.peak,
            predicted_seconds=timeline.seconds,
            transfers=timeline.transfers,
        )
        return streamed, timeline


def _fenced(found: Plan | Infeasible, streams: bool) -> Plan | Infeasible:
    """`found`, which is never plain jit's own order where loops stream slices of state."""
    if isinstance(found, Plan):
        return dataclasses.replace(found, fenced=found.fenced or streams)
    if found.plan is None:
        return found
    plan = dataclasses.replace(found.plan, fenced=found.plan.fenced or streams)
    return dataclasses.replace(found, plan=plan)


def _outside(
    program: Program, order: Sequence[int], transfers: Sequence[Transfer]
) -> list[Transfer]:
    """`transfers` with their points outside of the loop over sub-batches."""
    begin, end = (p for p, s in enumerate(order) if program.steps[s].is_boundary)
    found = []
    for t in transfers:
        reads = (p for p, s in enumerate(order) if t.buffer in program.steps[s].reads)
        point = begin if next(reads, len(order)) <= end else end + 1
        points = (point if begin < p <= end else p for p in (t.start, t.gone, t.fetch, t.back))
        found.append(Transfer(t.buffer, *points))
    return found
