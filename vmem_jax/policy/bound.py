"""bound: seconds and bytes below which no plan of one order goes, and where a search may start.

The bound holds for every plan whose first runs stand in a given order, the base, with any pure steps
run again in between and any transfers: `auto` looks for its plans there. Plans in another order are
not bounded. It comes from the program of `stages`, whose constraints hold in each of them. More rows
bound higher but are harder to solve, so several numbers of them are tried and the highest bound is
taken. Where HiGHS is stopped, its dual bound is a bound all the same.

Between the rows memory is not looked at, so what is recomputed takes memory only where it is still
there at a row: for budgets that leave no room for a stretch of recomputed neighbours the bound is
far below what can be reached.
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
from vmem_jax.policy.recomputation import Drop, Recomputation

ROWS = (1, 2, 4)
"""So many rows are tried. Of VGG-116 eight bound lower than four in the same time."""

_STARTS = 2
"""Of the numbers of rows the first two give a start: four take seconds even without branching."""

_PARKING_TARGET = 0.96
"""Share of the budget that a start with transfers is planned for."""

_PARKING_PRICE = 0.01
"""Share of the step's seconds that a start is charged for parking a budget's worth of bytes, so
that of two choices of equal time it takes the one that moves less."""

_APART = 1 / 32
"""Rows are at least this share of the step's seconds apart: what is near says much the same."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """What no plan of one base order goes below.

    Attributes:
      seconds: of one step within the budget; infinite where no plan is within it.
      peak: bytes; what the arguments, the outputs and the largest single step take.
      exact: whether the program that gave `seconds` was solved to the end, in integers. If not,
        more time could raise it; it holds all the same.
    """

    seconds: float
    peak: int
    exact: bool

    def gap(self, seconds: float) -> float:
        """By how much `seconds` are over the bound, as a share of it."""
        return seconds / self.seconds - 1 if self.seconds else 0.0


def lower_bound(
    program: Program,
    costs: Costs,
    base: Sequence[int],
    budget: int | None,
    limit: float = 1.0,
) -> Bound:
    """The bound of all plans of `program` within `budget` bytes whose first runs stand as in `base`.

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
    """Where a search may start: the choices of the program of some rows.

    Attributes:
      lower_bound_seconds: seconds that no plan of these rows goes below; a bound of all plans where
        nothing can be moved.
      drops: idle intervals of the base to recompute across.
      parks: idle intervals of the base to spend in host memory.
    """

    lower_bound_seconds: float
    drops: frozenset[Drop]
    parks: frozenset[Drop]


def starts(recomputation: Recomputation, costs: Costs, budget: int) -> Iterator[Start]:
    """What the programs of the fewest rows choose to drop and to park."""
    program, base = recomputation.program, recomputation.base
    needs = [step_nbytes(program, program.steps[s]) for s in base]
    # the buffers of copies in flight take memory too, which the rows do not see
    target = budget if costs.link is None else int(_PARKING_TARGET * budget)
    for rows in _choices(simulate(program, base, costs), needs)[:_STARTS]:
        stages = Stages(program, costs, base, target, rows, _PARKING_PRICE)
        # no clock: the same program has the same plan on every machine
        found = stages.solve(node_limit=1, mip_rel_gap=5e-3)
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
    """Rows to try: the peak, then where steps that need much stand while much lies idle."""
    if not timeline.order:
        return []
    live = timeline.live_nbytes
    height = lambda p: live[p] if 0 <= p < len(live) else 0
    # where less is live than beside it, the neighbour says more
    tops = [p for p in range(len(live)) if height(p - 1) <= live[p] > height(p + 1)]
    found = [timeline.peak_at]
    for p in sorted(tops, key=lambda p: -needs[p] * (live[p] - needs[p])):
        near = min(abs(timeline.start[p] - timeline.start[q]) for q in found)
        if len(found) < max(ROWS) and near > _APART * timeline.seconds:
            found.append(p)
    return [sorted(found[:n]) for n in sorted({min(n, len(found)) for n in ROWS})]
