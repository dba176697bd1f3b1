"""bound: lower bounds of seconds and peak for the plans of one order, and starts for a search.

The bound holds for every plan whose first runs are in a given order, the base, with any repetitions
of pure steps in between and any transfers. `auto` looks for such plans. It comes from the program of
`milp`. More rows give a higher bound but are harder to solve, so several numbers of rows are tried
and the highest bound is taken. If HiGHS is stopped, its dual bound is still a bound.

Memory between the rows is not constrained. So the bound is far too low for budgets that leave no room
for recomputed neighbours.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

from vmem_jax.core.costs import Costs
from vmem_jax.core.liveness import least_nbytes, step_nbytes
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.policy.milp import Stages
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.recomputation import Drop, Recomputation


@dataclasses.dataclass(frozen=True)
class Bound:
    """Lower bounds for the plans of one base order.

    Attributes:
      seconds: of one step within the budget; infinite if no plan is within it.
      peak: bytes of the arguments, the outputs and the largest single step.
      exact: whether the program that gave `seconds` was solved to the integer optimum. If not, more
        time could raise the bound.
    """

    seconds: float
    peak: int
    exact: bool

    def gap(self, seconds: float) -> float:
        """The excess of `seconds` over the bound, as a share of the bound."""
        return seconds / self.seconds - 1 if self.seconds else 0.0


def lower_bound(
    program: Program,
    costs: Costs,
    base: Sequence[int],
    budget: int | None,
    limit: float = 1.0,
) -> Bound:
    """The bound of all plans of `program` within `budget` bytes whose first runs are those of `base`.

    Args:
      base: every step once, in a valid order.
      budget: bytes, or None for no limit.
      limit: seconds that HiGHS may take for each number of rows.
    """
    seconds = sum(costs.seconds[s] for s in base)
    needs = [step_nbytes(program, program.steps[s]) for s in base]
    peak = least_nbytes(program)
    if budget is not None and peak > budget:
        return Bound(float("inf"), peak, True)
    timeline = simulate(program, base, costs)
    if budget is None or timeline.peak <= budget:
        return Bound(seconds, peak, True)
    best = Bound(seconds, peak, False)
    for rows in _choices(timeline, needs):
        found = Stages(program, costs, base, budget, rows).solve(time_limit=limit)
        if found.seconds > best.seconds or (found.solved and found.seconds == best.seconds):
            best = Bound(found.seconds, peak, found.solved)
    return best


def quick_bound(program: Program, costs: Costs, base: Sequence[int], budget: int | None) -> float:
    """Seconds of `lower_bound` by one linear program: a hundredth of a plan's time."""
    timeline = simulate(program, base, costs)
    if budget is None or timeline.peak <= budget:
        return timeline.seconds
    stages = Stages(program, costs, base, budget, [timeline.peak_at])
    return max(stages.solve(relaxed=True).seconds, timeline.seconds)


@dataclasses.dataclass(frozen=True)
class Start:
    """A start for a search: the solution of the program of some rows.

    Attributes:
      lower_bound_seconds: the optimum of these rows; a bound of all plans if nothing can be moved.
      drops: idle intervals of the base over which a buffer is dropped.
      parks: idle intervals of the base over which a buffer is in host memory.
    """

    lower_bound_seconds: float
    drops: frozenset[Drop]
    parks: frozenset[Drop]


def starts(recomputation: Recomputation, costs: Costs, budget: int) -> Iterator[Start]:
    """The solutions of the programs with the fewest rows."""
    program, base = recomputation.program, recomputation.base
    needs = [step_nbytes(program, program.steps[s]) for s in base]
    # the buffers of copies in flight take memory too, which the rows do not see
    target = budget if costs.link is None else int(PARAMS.parking_target * budget)
    for rows in _choices(simulate(program, base, costs), needs)[: PARAMS.bound_starts]:
        stages = Stages(program, costs, base, target, rows, PARAMS.parking_price)
        # no clock: the same program has the same plan on every machine
        found = stages.solve(node_limit=1, mip_rel_gap=PARAMS.start_gap)
        drops: set[Drop] = set()
        parks: set[Drop] = set()
        for row, gone, parked in zip(rows, found.gone, found.parked, strict=False):
            for b in gone | parked:
                uses = recomputation.uses[b]
                n = bisect.bisect_left(uses, row) - 1
                if n + 1 == len(uses):
                    continue  # it is of use to recomputation alone
                if b in parked:
                    parks.add((b, n))
                elif recomputation.may_drop(b, uses[n + 1]):
                    drops.add((b, n))
        yield Start(found.seconds, frozenset(drops - parks), frozenset(parks))


def _choices(timeline: Timeline, needs: Sequence[int]) -> list[list[int]]:
    """Rows to try: the peak, then steps of large need while much lies idle."""
    if not timeline.order:
        return []
    live = timeline.live_nbytes
    height = lambda p: live[p] if 0 <= p < len(live) else 0
    # where less is live than beside it, the neighbour says more
    tops = [p for p in range(len(live)) if height(p - 1) <= live[p] > height(p + 1)]
    found = [timeline.peak_at]
    for p in sorted(tops, key=lambda p: -needs[p] * (live[p] - needs[p])):
        near = min(abs(timeline.start[p] - timeline.start[q]) for q in found)
        if len(found) < max(PARAMS.bound_rows) and near > PARAMS.rows_apart * timeline.seconds:
            found.append(p)
    return [sorted(found[:n]) for n in sorted({min(n, len(found)) for n in PARAMS.bound_rows})]
