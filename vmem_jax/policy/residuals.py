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

Where a loop is divided into segments of k iterations (`capture.loop_segments`), a value may also be
kept in a stack of k slices, if it is made again for one segment at a time from what the segment
carries in. That has the same rows once more, of what has to be made again there:

    keep[b] + part[b] + redo[producer of b] >= need[b]
    again_need[b] >= part[b]
    again[producer of b] + carry[b] >= part[b]
    keep[b] + again[producer of b] + carry[b] >= again_need[b]
    again_need[r] >= again[s]            for every operand r of step s
    again_need[c'] >= carry[c]           where c is c' of the iteration before

and carry[c] costs a slice a segment. Where segments are divided in turn, again[s] costs what it does
on all levels and carry[c] a slice for each segment whose carry-ins exist at a time. Every choice of
lengths is a program of its own (`policy.segment_lengths`). No choice both keeps b whole and in part,
so the third of these rows changes no choice; but half of a value whole and half of it in part would
cost the relaxation nothing but bytes without it.

In small loops kernels take what starting them takes. A stack costs one where its value had none, as
the kernels that read it computed it; on a GPU each other copy to it is one, and each copy out of it,
and what reads a slice waits for device memory: here for each by itself, though those that one kernel
reads come together. Counting the iterations that run again costs another kernel.

What an iteration of the backward loop holds beside the stacks (`policy.body_memory`) may be bounded
as well, at some of its positions p. With done[s] for a step that has run again by then:

    keep[b] + done[producer of b] >= 1        for what the backward loop read until p
    keep[r] + done[producer of r] >= done[s]  for every operand r of step s
    live[b] >= done[producer of b] - keep[b]  for what it reads from p on
    live[r] >= done[producer of r] - keep[r] + redo[s] - done[s] - 1
    held >= base(p) + sum of bytes(b) live[b]
    sum of length x bytes(b) keep[b] + held <= limit

Without the bound it is a minimum cut, as in the partitioners that cut a graph between its forward
and its backward part at one price for memory (Herrmann et al., 2019, survey what else there is). With
it every number of bytes has its best choice. Of several loops the rows stand in one program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from scipy import optimize, sparse

from vmem_jax.core.costs import Machine
from vmem_jax.core.paired import Division, DivisionCounts, PairedLoop
from vmem_jax.core.program import LoopSegments
from vmem_jax.policy.body_memory import BodyMemory
from vmem_jax.policy.params import PARAMS


@dataclasses.dataclass(frozen=True)
class Held:
    """What counts beside the stacks: the iteration of a backward loop that holds the most with them.

    Attributes:
      bodies: the backward iteration of each loop.
      waiting: for each loop those whose stacks are there while it runs backwards.
      least: bytes that count beside all stacks in any case.
      at: pairs of a loop and a position of its backward iteration that are counted.
    """

    bodies: tuple[BodyMemory, ...]
    waiting: tuple[frozenset[int], ...]
    least: int = 0
    at: frozenset[tuple[int, int]] = frozenset()

    def nbytes(self, kept: Kept) -> int:
        """Bytes of the stacks of `kept` and of what counts beside them."""
        there = lambda i: sum(kept.each[j] for j in self.waiting[i])
        return max(
            [kept.nbytes + self.least, *(there(i) + most for i, _, most in self._most(kept))]
        )

    def with_most(self, kept: Kept) -> Held:
        """Counts also where the iterations of `kept` hold the most."""
        return dataclasses.replace(self, at=self.at | {(i, at) for i, at, _ in self._most(kept)})

    def _most(self, kept: Kept) -> Iterator[tuple[int, int, int]]:
        for i, (body, buffers) in enumerate(zip(self.bodies, kept.buffers, strict=True)):
            held = body.held(buffers)
            if held:
                at = max(range(len(held)), key=held.__getitem__)
                yield i, at, held[at]


@dataclasses.dataclass(frozen=True)
class Kept:
    """A choice for some loops.

    Attributes:
      buffers: of each loop what is kept, in stacks.
      nbytes: of all stacks.
      seconds: that computing the rest again takes, and the stacks.
      every: of each loop the lengths of its segments, of each level (`core.paired.Division`); ()
        where it is not divided.
      parts: of each loop those of `buffers` whose stacks exist for an innermost segment at a time.
      each: bytes of the stacks of each loop.
    """

    buffers: tuple[frozenset[int], ...]
    nbytes: int
    seconds: float
    every: tuple[tuple[int, ...], ...] = ()
    parts: tuple[frozenset[int], ...] = ()
    each: tuple[int, ...] = ()

    @property
    def segments(self) -> LoopSegments:
        """As `Program.segments`."""
        if not any(self.every):
            return None
        both = zip(self.every, self.parts, strict=True)
        return tuple((every, tuple(sorted(parts)) if every else ()) for every, parts in both)


def choose(
    loops: Sequence[PairedLoop],
    machine: Machine,
    limit: int | None = None,
    fewest: bool = False,
    every: Sequence[Sequence[int]] = (),
    held: Held | None = None,
    without: Sequence[Collection[int]] = (),
) -> Kept | None:
    """The fastest choice for `loops` whose stacks are within `limit` bytes; None where none is.

    Args:
      machine: what the steps take time on.
      limit: bytes of all stacks together, and of what is `held`; None for no limit.
      fewest: the choice with the fewest bytes instead, and of those the fastest.
      every: of each loop the lengths of its segments, () where it is not to be divided.
      held: what counts beside the stacks; None for nothing.
      without: of each loop what is not to be stacked.
    """
    model = Stacks(loops, machine, counts_of(loops, every or ((),) * len(loops)), held)
    for keep, buffers in zip(model.keeps, without, strict=False):
        for b in buffers:
            model.upper[keep[b]] = 0
    found = model.solve(limit, fewest)
    return None if found is None else model.kept(found, every)


def counts_of(
    loops: Sequence[PairedLoop], every: Sequence[Sequence[int]]
) -> tuple[DivisionCounts | None, ...]:
    """Of each loop what its division into segments of these lengths counts; None without any."""
    pairs = zip(loops, every, strict=True)
    return tuple(Division(loop.length, tuple(e)).counts if e else None for loop, e in pairs)


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


class Stacks:
    """The program of all loops; its variables are those of one after another."""

    def __init__(
        self,
        loops: Sequence[PairedLoop],
        machine: Machine,
        divisions: Sequence[DivisionCounts | None],
        held: Held | None = None,
    ) -> None:
        self.loops, self.machine = loops, machine
        self.costs: list[float] = []
        self.nbytes: list[int] = []
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.rows: list[tuple[list[int], list[float], float]] = []  # sum of these >= the last
        self.keeps: list[dict[int, int]] = []  # of each loop the variable of every buffer
        self.parts: list[dict[int, int]] = []  # the same of its stack for one segment
        self.redos: list[dict[int, int]] = []  # the variable of every step
        self.own: list[range] = []  # its variables
        for loop, division in zip(loops, divisions, strict=True):
            before = len(self.costs)
            self._add(loop, division)
            self.own.append(range(before, len(self.costs)))
        self.integral = len(self.costs)  # the variables behind these may have any value
        self.counted = {i: n for i, n in enumerate(self.nbytes) if n}
        if held is not None:
            self._add_held(held)

    def _variable(self, cost: float, nbytes: int = 0, low: float = 0, high: float = 1) -> int:
        self.costs.append(cost)
        self.nbytes.append(nbytes)
        self.lower.append(low)
        self.upper.append(high)
        return len(self.costs) - 1

    def _needs(self, needed: int, *makers: int | None) -> None:
        """What `needed` stands for is there by one of `makers`."""
        by = [i for i in makers if i is not None]
        self.rows.append(([*by, needed], [*([1.0] * len(by)), -1.0], 0.0))

    def _excludes(self, a: int, b: int) -> None:
        self.rows.append(([a, b], [-1.0, -1.0], -1.0))

    def _add(self, loop: PairedLoop, division: DivisionCounts | None) -> None:
        """Adds `loop`, divided or not."""
        program, length = loop.program, loop.length
        seconds = [loop.times * self.machine.seconds(step) for step in program.steps]
        steps = [s for s in range(len(program.steps)) if s not in loop.late_steps]
        pure = lambda s: program.steps[s].pure
        redo = {s: self._variable(length * seconds[s], high=pure(s)) for s in steps}
        early = [b for b in range(len(program.buffers)) if program.producer[b] in redo]
        early += sorted(loop.carried)
        need = {b: self._variable(0.0, low=b in loop.wanted) for b in early}
        keep, part = dict[int, int](), dict[int, int]()
        second, launch = loop.times / self.machine.bandwidth, loop.times * self.machine.launch
        copies = lambda b: (b in loop.copied) + (b in loop.copied_out)
        moving = lambda b: second * PARAMS.stack_passes * copies(b) * program.buffers[b].nbytes
        copying = lambda b: (b in loop.copied - loop.fused) + (b in loop.copied_out)
        kernels = lambda b: copying(b) * program.on_gpu + (b in loop.fused)
        waiting = loop.times * self.machine.latency * program.on_gpu
        stacking = lambda b: moving(b) + launch * kernels(b) + waiting
        # a whole stack is no result of divided loops: a step puts slices into it, on a GPU the copy
        divided_on_cpu = division is not None and not program.on_gpu
        putting = lambda b: launch * (divided_on_cpu and b in loop.copied)
        for b in early:
            size, by = program.buffers[b].nbytes, program.producer[b]
            # it is there for the backward loop alone, and made once anyway
            making = seconds[by] if by >= 0 and by not in loop.first_steps else 0.0
            keep[b] = self._variable(length * (stacking(b) + putting(b) + making), length * size)
            if division is not None:
                seconds_once = length * stacking(b) + division.last * making
                part[b] = self._variable(seconds_once, division.slices * size)
            self._needs(need[b], keep[b], part.get(b), redo.get(by))
        for s in steps:
            for r in program.steps[s].reads:
                if r in need:
                    self._needs(redo[s], need[r])
        tied = [(s, w) for s in steps if program.steps[s].tied for w in program.steps[s].writes]
        for s, w in tied:  # made again, nothing of it is of the first time
            self._excludes(keep[w], redo[s])
            if division is not None:
                self._excludes(part[w], redo[s])
        self.keeps.append(keep)
        self.parts.append(part)
        self.redos.append(redo)
        if division is None:
            return
        again = {s: self._variable(division.again * seconds[s], high=pure(s)) for s in steps}
        wanted = {b: self._variable(0.0) for b in early}
        often, at_once = division.carry_ins, division.carry_ins_at_once
        carry = {
            b: self._variable(often * stacking(b), at_once * program.buffers[b].nbytes)
            for b in loop.carried
        }
        runs = self._variable(division.again * launch)  # a kernel counts what runs again
        for b in early:
            self._needs(part[b], wanted[b])
            self._needs(part[b], runs)
            makers = again.get(program.producer[b]), carry.get(b)
            self._needs(part[b], *makers)
            self._needs(wanted[b], keep[b], *makers)
        for s in steps:
            for r in program.steps[s].reads:
                if r in wanted:
                    self._needs(again[s], wanted[r])
        for s, w in tied:
            self._excludes(keep[w], again[s])
        for b, after in loop.carries:
            if after in wanted:
                self._needs(carry[b], wanted[after])

    def _add_held(self, held: Held) -> None:
        unit = max(sum(self.nbytes), 1)
        most = self._variable(0.0, high=np.inf)
        self.counted = {most: unit}

        def add(loops: Iterable[int], base: int, live: Sequence[tuple[int, int]] = ()) -> None:
            stacks = [(i, self.nbytes[i]) for j in loops for i in self.own[j] if self.nbytes[i]]
            terms = [(i, -size / unit) for i, size in (*stacks, *live)]
            columns, values = [most, *(i for i, _ in terms)], [1.0, *(v for _, v in terms)]
            self.rows.append((columns, values, base / unit))

        add(range(len(self.loops)), held.least)
        for i, at in sorted(held.at):
            body = held.bodies[i]
            add(held.waiting[i], body.base[at], self._live(i, body, at))

    def _live(self, i: int, body: BodyMemory, at: int) -> list[tuple[int, int]]:
        """Variables and bytes of what is live at position `at` of loop `i`, made again."""
        program, redo = self.loops[i].program, self.redos[i]
        keep, part = self.keeps[i], self.parts[i]
        stacked = lambda b: [of[b] for of in (keep, part) if b in of]
        done = {s: self._variable(0.0) for s in redo}
        for s in redo:
            self._needs(done[s], redo[s])
            for r in program.steps[s].reads:
                if r in keep:
                    self._needs(done[s], *stacked(r), done.get(program.producer[r]))
        live = list[tuple[int, int]]()
        for b in keep:
            s, (first, last) = program.producer[b], body.reads.get(b, (at + 1, -1))
            if first <= at:
                by = [*stacked(b), *([done[s]] if s in done else [])]
                self.rows.append((by, [1.0] * len(by), 1.0))
            if s not in done:
                continue
            column, size = self._variable(0.0), program.buffers[b].nbytes
            live.append((column, size))
            made = [column, done[s], *stacked(b)]
            signs = [1.0, -1.0, *([1.0] * len(stacked(b)))]
            if last >= at:
                self.rows.append((made, signs, 0.0))
            for r in program.readers[b]:
                if r in redo:
                    self.rows.append(([*made, redo[r], done[r]], [*signs, -1.0, 1.0], -1.0))
        return live

    def least(self, limit: int | None, fewest: bool) -> float:
        """Seconds, or with `fewest` bytes, that every choice takes at the least: those of the
        relaxation, whose variables have any value between their bounds."""
        if not self.costs:
            return 0.0
        prices = np.asarray(self.nbytes if fewest else self.costs, float)
        found = self._solved(prices, limit, integral=0)
        return math.inf if found.x is None else float(found.x @ prices)

    def _solved(
        self, prices: np.ndarray, limit: int | None, integral: int, below: float = math.inf
    ) -> optimize.OptimizeResult:
        """By HiGHS; the first `integral` variables are whole numbers."""
        count = len(self.costs)
        rows = [(columns, values, low, np.inf) for columns, values, low in self.rows]
        if limit is not None:
            columns, share = [*self.counted], max(limit, 1)
            rows.append(
                (columns, [n / share for n in self.counted.values()], -np.inf, limit / share)
            )
        if below < math.inf:
            rows.append(([*range(count)], [c / below for c in self.costs], -np.inf, 1.0))
        matrix = sparse.csr_array(
            (
                np.concatenate([np.asarray(values, float) for _, values, *_ in rows]),
                np.concatenate([np.asarray(columns, int) for columns, *_ in rows]),
                np.cumsum([0, *(len(columns) for columns, *_ in rows)]),
            ),
            shape=(len(rows), count),
        )
        return optimize.milp(
            prices * (count / max(prices.sum(), 1e-30)),  # near 1 each, as HiGHS's tolerances
            integrality=np.arange(count) < integral,
            bounds=optimize.Bounds(np.asarray(self.lower), np.asarray(self.upper)),
            constraints=optimize.LinearConstraint(
                matrix, [low for *_, low, _ in rows], [high for *_, high in rows]
            ),
            options={"mip_rel_gap": PARAMS.residual_gap},
        )

    def solve(self, limit: int | None, fewest: bool, below: float = math.inf) -> np.ndarray | None:
        """Which variables the best choice within `limit` bytes takes, of those that need no more
        seconds than `below`; None where there is none."""
        if not self.costs:
            return np.zeros(0, bool)
        prices = np.asarray(self.costs, float)
        if fewest:
            prices /= max(prices.sum(), 1e-30)
            total = max(sum(self.counted.values()), 1)
            for i, n in self.counted.items():
                prices[i] += PARAMS.fewest_seconds * n / total
        found = self._solved(prices, limit, self.integral, below)
        return None if found.x is None else found.x > 0.5

    def cost(self, taken: np.ndarray) -> tuple[float, int]:
        """Seconds and bytes of stacks of a choice."""
        sizes = np.asarray(self.nbytes, np.int64)
        return float(taken @ np.asarray(self.costs, float)), int(sizes[taken].sum())

    def kept(self, taken: np.ndarray, every: Sequence[Sequence[int]] = ()) -> Kept:
        """The choice that takes these variables, of loops in segments of these lengths."""
        chosen = lambda of: tuple(frozenset(b for b, i in each.items() if taken[i]) for each in of)
        whole, parts = chosen(self.keeps), chosen(self.parts)
        parts = tuple(part - keep for keep, part in zip(whole, parts, strict=True))
        each = tuple(sum(self.nbytes[i] for i in own if taken[i]) for own in self.own)
        kept = tuple(keep | part for keep, part in zip(whole, parts, strict=True))
        both = zip(every or ((),) * len(parts), parts, strict=True)
        lengths = tuple(tuple(lengths) if part else () for lengths, part in both)
        return Kept(kept, sum(each), self.cost(taken)[0], lengths, parts, each)
