"""residuals: which values of a loop's iteration are kept for the backward loop, and which are not.

What the backward loop reads of the forward loop's values it either finds in a stack, of as many
slices as there are iterations, or computes again from what it finds. For each value that exists in
an iteration, that is one choice; a step that computes values again needs its operands there, kept or
computed again in turn. The fewest seconds within a number of bytes are the optimum of a small
mixed-integer program, the same whatever the number of layers:

    minimise    sum of length x (seconds(s) redo[s] + seconds(b) keep[b])
    subject to  keep[b] + redo[producer of b] >= need[b]
                need[r] >= redo[s]               for every operand r of step s
                need[b] = 1                      for what the backward loop itself reads
                sum of length x bytes(b) keep[b] <= limit

Without the last row it is a minimum cut, as in the partitioners that cut a graph between its forward
and its backward part at one price for memory (Herrmann et al., 2019, survey what else there is). With
it every number of bytes has its best choice. Of several loops the rows stand in one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import optimize, sparse

from vmem_jax.core.costs import Machine
from vmem_jax.core.paired import PairedLoop

_PASSES = 2
"""Over memory for each byte that is kept in a stack, beside the step that makes it. Scanned, the
layers of a decoder with 49 GiB of stacks took 40 ms longer on an H200 than unrolled: 2.4 passes."""

_FEWEST = 100
"""Seconds that all bytes count as, of the seconds of all steps, where the fewest bytes are wanted."""

_GAP = 1e-3
"""Relative, at which a choice is as good as the best."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """A choice for some loops.

    Attributes:
      buffers: of each loop what is kept, in stacks.
      nbytes: of all stacks.
      seconds: that computing the rest again takes, and the stacks.
    """

    buffers: tuple[frozenset[int], ...]
    nbytes: int
    seconds: float


def choose(
    loops: Sequence[PairedLoop], machine: Machine, limit: int | None = None, fewest: bool = False
) -> Kept | None:
    """The fastest choice for `loops` whose stacks are within `limit` bytes; None where none is.

    Args:
      machine: what the steps take time on.
      limit: bytes of all stacks together; None for no limit.
      fewest: the choice with the fewest bytes instead, and of those the fastest.
    """
    return _Model(loops, machine).solve(limit, fewest)


def front(loops: Sequence[PairedLoop], machine: Machine, count: int) -> tuple[Kept, ...]:
    """At most `count` choices from the one that takes the fewest seconds to the one with the fewest
    bytes, each faster than those behind it and smaller than those in front of it."""
    most = choose(loops, machine)
    fewest = choose(loops, machine, fewest=True)
    if most is None or fewest is None:
        return ()
    found = [most]
    for limit in np.geomspace(most.nbytes or 1, fewest.nbytes or 1, count)[1:-1]:
        kept = choose(loops, machine, limit=max(int(limit), fewest.nbytes))
        if kept is not None:
            found.append(kept)
    found.append(fewest)
    return tuple(_distinct(found))


def _distinct(found: Sequence[Kept]) -> Iterator[Kept]:
    last = None
    for kept in found:
        if last is None or kept.nbytes < last.nbytes:
            yield kept
            last = kept


class _Model:
    """The program of all loops; its variables are those of one after another."""

    def __init__(self, loops: Sequence[PairedLoop], machine: Machine) -> None:
        self.loops = loops
        self.costs: list[float] = []
        self.nbytes: list[int] = []
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.rows: list[tuple[list[int], list[float], float]] = []  # sum of these >= the last
        self.keeps: list[dict[int, int]] = []  # of each loop the variable of every buffer
        for loop in loops:
            self.keeps.append(self._add(loop, machine))

    def _variable(self, cost: float, nbytes: int = 0, low: float = 0, high: float = 1) -> int:
        self.costs.append(cost)
        self.nbytes.append(nbytes)
        self.lower.append(low)
        self.upper.append(high)
        return len(self.costs) - 1

    def _add(self, loop: PairedLoop, machine: Machine) -> dict[int, int]:
        program, length = loop.program, loop.length
        seconds = [length * machine.seconds(step) for step in program.steps]
        steps = [s for s in range(len(program.steps)) if s not in loop.late_steps]
        redo = {s: self._variable(seconds[s], high=program.steps[s].pure) for s in steps}
        early = [b for b in range(len(program.buffers)) if program.producer[b] in redo]
        early += sorted(loop.carried)
        need = {b: self._variable(0.0, low=b in loop.wanted) for b in early}
        keep = {}
        for b in early:
            size, by = length * program.buffers[b].nbytes, program.producer[b]
            cost = _PASSES * size / machine.bandwidth
            if by >= 0 and by not in loop.first_steps:
                cost += seconds[by]  # it is there for the backward loop alone, and made once anyway
            keep[b] = self._variable(cost, size)
            made = [keep[b], need[b]] + ([redo[by]] if by >= 0 else [])
            self.rows.append((made, [1.0, -1.0, 1.0][: len(made)], 0.0))
        for s in steps:
            for r in program.steps[s].reads:
                if r in need:
                    self.rows.append(([need[r], redo[s]], [1.0, -1.0], 0.0))
            if program.steps[s].tied:  # made again, nothing of it is of the first time
                for w in program.steps[s].writes:
                    self.rows.append(([keep[w], redo[s]], [-1.0, -1.0], -1.0))
        return keep

    def solve(self, limit: int | None, fewest: bool) -> Kept | None:
        count = len(self.costs)
        prices = np.asarray(self.costs) / max(sum(self.costs), 1e-30)
        if fewest:
            prices = prices + _FEWEST * np.asarray(self.nbytes) / max(sum(self.nbytes), 1)
        rows = [(columns, values, low, np.inf) for columns, values, low in self.rows]
        if limit is not None:
            columns = [i for i, n in enumerate(self.nbytes) if n]
            share = max(limit, 1)
            rows.append(
                (columns, [self.nbytes[i] / share for i in columns], -np.inf, limit / share)
            )
        if not count:
            return Kept(tuple(frozenset() for _ in self.loops), 0, 0.0)
        matrix = sparse.csr_array(
            (
                np.concatenate([np.asarray(values, float) for _, values, *_ in rows]),
                np.concatenate([np.asarray(columns, int) for columns, *_ in rows]),
                np.cumsum([0, *(len(columns) for columns, *_ in rows)]),
            ),
            shape=(len(rows), count),
        )
        found = optimize.milp(
            prices * count,  # near 1 each, which HiGHS's tolerances suit
            integrality=np.ones(count),
            bounds=optimize.Bounds(np.asarray(self.lower), np.asarray(self.upper)),
            constraints=optimize.LinearConstraint(
                matrix, [low for *_, low, _ in rows], [high for *_, high in rows]
            ),
            options={"mip_rel_gap": _GAP},
        )
        if found.x is None:
            return None
        taken = found.x > 0.5
        kept = tuple(frozenset(b for b, i in keep.items() if taken[i]) for keep in self.keeps)
        nbytes = sum(n for n, taken in zip(self.nbytes, taken, strict=True) if taken)
        seconds = sum(c for c, taken in zip(self.costs, taken, strict=True) if taken)
        return Kept(kept, nbytes, seconds)
