"""milp: a mixed-integer program for HiGHS that keeps, recomputes or parks each idle buffer.

It covers the plans whose *first* runs are in a given order, the base, with any repetitions of pure
steps in between and any transfers.

A few positions of the base, the *rows*, cut the step into stages. At each row a buffer that lies idle
across it has three states: on the device, parked in host memory, or gone, so that a step of a later
stage makes it again. This is Checkmate's program (Jain et al., MLSys 2020, section 4) with paging
(POET, Patil et al., ICML 2022), with a fixed number of stages instead of one for each step: O(n)
variables and constraints instead of O(n²).

Every constraint holds in every such plan, so the fewest seconds under them are a lower bound:

- at a row, the reads, writes and workspace of its step are on the device, and everything there is
  within the budget. Memory between rows is not constrained;
- a value that is read in a stage was on the device or parked at the row before, is made first in that
  stage, or is made again in it by its producer, whose inputs obey the same rule. Several repetitions
  of a step in one stage count once;
- a buffer that is parked at a row left before it and returns after it: each lane moves no more bytes
  than its rate allows in the seconds on its side, and both lanes together no more than the link
  allows in the whole step. These seconds are those of the base, of repetitions, and of waits;
- buffers that are together below a thousandth of the budget are always present and take no memory.

The numbers hold to HiGHS's tolerance, about 1e-6 of the step's seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from vmem_jax.core.costs import Costs
from vmem_jax.core.liveness import step_nbytes
from vmem_jax.core.program import Program
from vmem_jax.policy.params import PARAMS


@dataclasses.dataclass(frozen=True)
class Solution:
    """The result of HiGHS.

    Attributes:
      seconds: a lower bound of the seconds of one step; infinite if no plan is within the budget.
      solved: whether that is the integer optimum. If not, more time could raise it.
      gone: for each row, the buffers that are dropped there; empty if no plan was found.
      parked: for each row, the buffers that are in host memory there; likewise.
    """

    seconds: float
    solved: bool
    gone: tuple[frozenset[int], ...] = ()
    parked: tuple[frozenset[int], ...] = ()


class Stages:
    """The program of one choice of rows.

    Stage k lies between the starts of the first runs at rows k − 1 and k; the last one ends with the
    step. Seconds are in units of the base's, bytes in units of the budget. With a `price` on what is
    parked, as a share of the base's seconds for a budget's worth of bytes at a row, the optimum is no
    bound.
    """

    def __init__(
        self,
        program: Program,
        costs: Costs,
        base: Sequence[int],
        budget: int,
        rows: Sequence[int],
        price: float = 0.0,
    ) -> None:
        self.program, self.costs, self.base, self.rows = program, costs, base, rows
        self.elapsed = [0.0, *itertools.accumulate(costs.seconds[s] for s in base)]
        self.unit = self.elapsed[-1] or 1.0  # of seconds
        self.budget, self.price = budget, price
        rank = {s: p for p, s in enumerate(base)}
        self.made = [rank[s] if s >= 0 else -1 for s in program.producer]
        self.uses = [sorted(rank[r] for r in readers) for readers in program.readers]
        self.overwritten = {i: rank[by] for i, by in program.overwritten_by.items()}
        self.counted = _counted(program, budget)
        self.highs = _Highs()
        var = self.highs.variable
        # seconds that were added to the base's at each row, and at the end
        self.added = [var(most=float("inf"), integer=False) for _ in rows]
        self.added.append(var(1.0, most=float("inf"), integer=False))
        # buffer -> whether it is there or parked at the row; None for what its step uses
        self.there: list[dict[int, int | None]] = []
        for row in rows:
            step = program.steps[base[row]]
            used = {*step.reads, *step.writes}
            self.there.append({b: None if b in used else var() for b in self._wanted(row)})
        # step -> whether it runs again in the stage; in the first, nothing gains by that
        self.again: list[dict[int, int]] = [{} for _ in range(len(rows) + 1)]
        for stage in range(1, len(rows) + 1):
            self._recompute(stage)
        for stage, again in enumerate(self.again):
            before = [(self.added[stage - 1], -1.0)] if stage else []
            ran = [(v, -costs.seconds[s] / self.unit) for s, v in again.items()]
            self.highs.at_least(0.0, [(self.added[stage], 1.0), *before, *ran])
        self.parked = self._park() if costs.link is not None else [{} for _ in rows]
        for row, there, parked in zip(rows, self.there, self.parked, strict=True):
            free = budget - program.resident_nbytes - step_nbytes(program, program.steps[base[row]])
            held = [(v, self._share(b)) for b, v in there.items() if v is not None]
            away = [(v, -self._share(b)) for b, v in parked.items()]
            self.highs.at_most(free / budget, [*held, *away])

    def solve(self, *, relaxed: bool = False, **limits: float) -> Solution:
        """Solves it, or its linear relaxation, within `limits`, HiGHS's: `time_limit` in seconds,
        `node_limit`."""
        added, solved, values = self.highs.solve(limits, relaxed)
        seconds = self.elapsed[-1] + self.unit * added
        if not values:
            return Solution(seconds, solved)
        is_one = lambda v: v is not None and values[v] > 0.5
        parked = [frozenset(b for b, v in at.items() if is_one(v)) for at in self.parked]
        gone = [
            frozenset(b for b, v in at.items() if v is not None and not is_one(v))
            for at in self.there
        ]
        return Solution(seconds, solved, tuple(gone), tuple(parked))

    def _share(self, b: int) -> float:
        return self.program.buffers[b].nbytes / self.budget

    def _wanted(self, row: int) -> list[int]:
        """What is made up to `row` and may be of use after it, if only to make others again."""
        program = self.program
        ahead = lambda b: self.made[b] <= row and self.uses[b] and self.uses[b][-1] > row
        stack = [b for b in range(len(program.buffers)) if self.counted[b] and ahead(b)]
        seen = set(stack)
        while stack:
            step = program.steps[program.producer[stack.pop()]]
            more = {r for r in step.reads if self.counted[r] and step.pure} - seen
            seen |= more
            stack += more
        return sorted(seen)

    # -- recomputation

    def _recompute(self, stage: int) -> None:
        """What is used in the stage, or there at its end, was there before it or is made in it."""
        before = self.rows[stage - 1]
        last = stage == len(self.rows)
        end = len(self.base) if last else self.rows[stage] + 1
        for b in {b for s in self.base[before + 1 : end] for b in self.program.steps[s].reads}:
            self._available(stage, b, 1.0)
        if not last:
            for b, v in self.there[stage].items():
                if v is not None:
                    self._available(stage, b, 0.0, v)
        done: set[int] = set()
        while new := self.again[stage].keys() - done:  # what is made again needs more made again
            for s in sorted(new):
                for r in self.program.steps[s].reads:
                    self._available(stage, r, 0.0, self.again[stage][s])
            done |= new

    def _available(self, stage: int, b: int, low: float, user: int | None = None) -> None:
        """`b` is there or parked at the row before, or made again: as much as `user`, or `low`."""
        if not self.counted[b] or self.made[b] > self.rows[stage - 1]:
            return
        there = self.there[stage - 1].get(b, -1)
        if there is None:
            return
        terms = [(self._again(stage, self.program.producer[b]), 1.0)]
        terms += [(there, 1.0)] if there >= 0 else []
        terms += [(user, -1.0)] if user is not None else []
        self.highs.at_least(low, terms)

    def _again(self, stage: int, s: int) -> int:
        if s not in self.again[stage]:
            step, before = self.program.steps[s], self.rows[stage - 1]
            gone = any(self.overwritten.get(r, before + 1) <= before for r in step.reads)
            self.again[stage][s] = self.highs.variable(most=0.0 if gone or not step.pure else 1.0)
        return self.again[stage][s]

    # -- transfers

    def _park(self) -> list[dict[int, int]]:
        """For each row what is parked there; the lanes' constraints."""
        link, highs, elapsed = self.costs.link, self.highs, self.elapsed
        assert link is not None
        parked: list[dict[int, int]] = []
        left: list[int] = []  # bytes that leave in each stage but the last
        for stage, there in enumerate(self.there):
            first, row = self.rows[stage - 1] if stage else -1, self.rows[stage]
            now: dict[int, int] = {}
            sizes = []
            for b, kept in there.items():
                if kept is None or not self.program.buffers[b].movable:
                    continue
                v = now[b] = highs.variable(self.price * self._share(b))
                highs.at_least(0.0, [(kept, 1.0), (v, -1.0)])
                leaves = highs.variable(integer=False)
                sizes.append((leaves, -self._share(b)))
                # what is used in between has come back and leaves again
                used = any(first < use < row for use in self.uses[b])
                stays = [(parked[-1][b], 1.0)] if stage and not used and b in parked[-1] else []
                highs.at_least(0.0, [(leaves, 1.0), (v, -1.0), *stays])
            left.append(highs.variable(most=float("inf"), integer=False))
            highs.at_least(0.0, [(left[-1], 1.0), *sizes])
            parked.append(now)
        head = min((elapsed[self.made[b] + 1] for now in parked for b in now), default=0.0)
        # whatever comes back serves a read of the base, if only through what is made from it
        last = max((use for there in self.there for b in there for use in self.uses[b]), default=0)
        total, tail = elapsed[-1], elapsed[-1] - elapsed[last]
        unit = self.budget / self.unit
        for stage, (row, now) in enumerate(zip(self.rows, parked, strict=True)):
            out = [(v, unit / link.out) for v in left[: stage + 1]]
            time = max(elapsed[row] - head, 0.0) / self.unit
            highs.at_most(time, [*out, (self.added[stage], -1.0)])
            into = [(v, unit / link.into) for v in left[stage + 1 :]]
            into += [(v, unit / link.into * self._share(b)) for b, v in now.items()]
            time = max(total - tail - elapsed[row + 1], 0.0) / self.unit
            highs.at_most(time, [*into, (self.added[-1], -1.0), (self.added[stage], 1.0)])
        both = max(link.out, link.into, min(link.both, link.out + link.into))
        across = [(v, 2 * unit / both) for v in left]
        highs.at_most((total - tail - head) / self.unit, [*across, (self.added[-1], -1.0)])
        return parked


def _counted(program: Program, budget: int) -> list[bool]:
    """For every buffer, whether its bytes count: all that can be freed, except the smallest."""
    small, total = set(), 0
    for b in sorted(range(len(program.buffers)), key=lambda b: program.buffers[b].nbytes):
        if not program.is_resident[b]:
            total += program.buffers[b].nbytes
            if total > budget / 1000:
                break
            small.add(b)
    return [not held and b not in small for b, held in enumerate(program.is_resident)]


Terms = Iterable[tuple[int, float]]
"""(variable, factor), to be summed."""


class _Highs:
    """A mixed-integer program for HiGHS: sparse, written down row by row."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._most: list[float] = []
        self._integer: list[bool] = []
        self._factors: list[float] = []
        self._columns: list[int] = []
        self._ends = [0]
        self._low: list[float] = []
        self._high: list[float] = []

    def variable(self, cost: float = 0.0, most: float = 1.0, integer: bool = True) -> int:
        """A new variable from 0 to `most`."""
        self._cost.append(cost)
        self._most.append(most)
        self._integer.append(integer)
        return len(self._cost) - 1

    def at_least(self, low: float, terms: Terms) -> None:
        self._row(low, float("inf"), terms)

    def at_most(self, high: float, terms: Terms) -> None:
        self._row(-float("inf"), high, terms)

    def _row(self, low: float, high: float, terms: Terms) -> None:
        for column, factor in terms:
            self._columns.append(column)
            self._factors.append(factor)
        self._ends.append(len(self._columns))
        self._low.append(low)
        self._high.append(high)

    def solve(
        self, limits: Mapping[str, float], relaxed: bool = False
    ) -> tuple[float, bool, list[float]]:
        """(The dual bound of the cost, at least 0; whether it is the optimum; the variables).

        The cost is infinite where nothing fulfils the constraints; without variables none were found.
        """
        # imported here: it takes as long as JAX itself, and most plans do without
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        integers = not relaxed and len(self._cost) <= PARAMS.most_integers
        matrix = csr_array(
            (self._factors, self._columns, self._ends), shape=(len(self._low), len(self._cost))
        )
        found = milp(
            self._cost,
            integrality=self._integer if integers else None,
            bounds=Bounds(0, self._most),
            constraints=LinearConstraint(matrix, self._low, self._high),
            options={"mip_rel_gap": PARAMS.bound_gap, **limits},
        )
        if found.status == 2:
            return float("inf"), True, []
        solved = found.status == 0
        bound = found.mip_dual_bound if integers else found.fun if solved else None
        values = [] if found.x is None else [float(v) for v in found.x]
        return max(bound or 0.0, 0.0), solved and integers, values
