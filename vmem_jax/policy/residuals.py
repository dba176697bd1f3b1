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
    keep[b] + again[producer of b] + carry[b] >= again_need[b]
    again_need[r] >= again[s]            for every operand r of step s
    again_need[c'] >= carry[c]           where c is c' of the iteration before

and carry[c] costs a slice a segment. Where segments are divided in turn, again[s] costs what it does
on all levels and carry[c] a slice for each segment whose carry-ins exist at a time. Every choice of
lengths is a program of its own.

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
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from scipy import optimize, sparse

from vmem_jax.core.costs import Machine
from vmem_jax.core.paired import Division, PairedLoop
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
    model = _Model(loops, machine, every or ((),) * len(loops), held)
    for keep, buffers in zip(model.keeps, without, strict=False):
        for b in buffers:
            model.upper[keep[b]] = 0
    return model.solve(limit, fewest)


def choose_divided(
    loops: Sequence[PairedLoop], machine: Machine, limit: int | None = None, fewest: bool = False
) -> Kept | None:
    """`choose` where loops may be divided into segments, of whatever lengths are the best."""
    found = [*by_levels(loops, machine, limit, fewest)]
    return found[-1] if found else None


def by_levels(
    loops: Sequence[PairedLoop], machine: Machine, limit: int | None = None, fewest: bool = False
) -> Iterator[Kept]:
    """`choose`, and the same with one more level of segments after another. Ends where a level is not
    of use, unless nothing fits yet."""
    best = choose(loops, machine, limit, fewest)
    if best is not None:
        yield best
    for levels in range(1, max((_levels(loop.length) for loop in loops), default=0) + 1):
        divided = [_Model(loops, machine, every) for every in divisions(loops, levels)]
        found = _best(divided, limit, fewest, best)
        if found is not None and found is best:
            return
        if found is not None:
            yield found
        best = found


def _best(
    models: Sequence[_Model], limit: int | None, fewest: bool, best: Kept | None
) -> Kept | None:
    """`best`, or what is better of `models`: those first that may be the fastest, by their
    relaxations, so that there are few choices left in the others."""
    if fewest:
        found = [best, *(model.solve(limit, fewest) for model in models)]
        rank = lambda kept: (kept.nbytes, kept.seconds)
        return min(filter(None, found), key=rank, default=None)
    by_least = [(model.least_seconds(limit), model) for model in models]
    for least, model in sorted(by_least, key=operator.itemgetter(0)):
        below = math.inf if best is None else (1 - PARAMS.division_gap) * best.seconds
        if least >= below:
            break
        best = model.solve(limit, fewest, below) or best
    return best


def divisions(
    loops: Sequence[PairedLoop], levels: int = 1
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Lengths of segments on so many levels, of each loop outermost first, () of one that is too
    short.

    Innermost segments have from 2 iterations to half of them, where there are several loops each
    with the same multiple of the length that stores the fewest slices. From there outwards lengths
    are multiples, near a geometric series up to the loop's own: with these the fewest carry-ins exist
    at a time.
    """
    octaves = PARAMS.segment_octaves
    most = octaves * max((loop.length for loop in loops), default=0).bit_length()
    shares = [2 ** (step / octaves) for step in range(-most, most + 1)]
    every = (tuple(_lengths(loop.length, levels, share) for loop in loops) for share in shares)
    return tuple(each for each in dict.fromkeys(every) if any(each))


def _levels(length: int) -> int:
    """The most levels of segments that are of use."""
    if length < PARAMS.shortest_loop:
        return 0
    fewest = lambda levels: (levels + 1) * length ** (1 / (levels + 1)) - levels
    levels = 1
    while fewest(levels + 1) <= PARAMS.level_share * fewest(levels):
        levels += 1
    return levels


def _lengths(length: int, levels: int, share: float) -> tuple[int, ...]:
    """The lengths of segments on so many levels or the most that are of use, outermost first."""
    levels = min(levels, _levels(length))
    if not levels:
        return ()
    last = min(max(round(share * length ** (1 / (levels + 1))), 2), -(-length // 2**levels))
    ratio = max(round((length / last) ** (1 / levels)), 2)
    every = (last * ratio**level for level in range(levels - 1, -1, -1))
    return tuple(each for each in every if each < length)


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

    def __init__(
        self,
        loops: Sequence[PairedLoop],
        machine: Machine,
        every: Sequence[Sequence[int]],
        held: Held | None = None,
    ) -> None:
        self.loops, self.machine, self.every = loops, machine, every
        self.costs: list[float] = []
        self.nbytes: list[int] = []
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.rows: list[tuple[list[int], list[float], float]] = []  # sum of these >= the last
        self.keeps: list[dict[int, int]] = []  # of each loop the variable of every buffer
        self.parts: list[dict[int, int]] = []  # the same of its stack for one segment
        self.redos: list[dict[int, int]] = []  # the variable of every step
        self.own: list[range] = []  # its variables
        for loop, lengths in zip(loops, every, strict=True):
            before = len(self.costs)
            self._add(loop, Division(loop.length, tuple(lengths)))
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

    def _add(self, loop: PairedLoop, division: Division) -> None:
        """Adds `loop`, divided."""
        program, length, is_divided = loop.program, loop.length, bool(division.every)
        seconds = [loop.times * self.machine.seconds(step) for step in program.steps]
        steps = [s for s in range(len(program.steps)) if s not in loop.late_steps]
        pure = lambda s: program.steps[s].pure
        redo = {s: self._variable(length * seconds[s], high=pure(s)) for s in steps}
        early = [b for b in range(len(program.buffers)) if program.producer[b] in redo]
        early += sorted(loop.carried)
        need = {b: self._variable(0.0, low=b in loop.wanted) for b in early}
        keep, part = dict[int, int](), dict[int, int]()
        passes = lambda b: PARAMS.stack_passes * ((b in loop.copied) + (b in loop.copied_out))
        second = loop.times / self.machine.bandwidth
        stacking = lambda b: second * passes(b) * program.buffers[b].nbytes
        for b in early:
            size, by = program.buffers[b].nbytes, program.producer[b]
            # it is there for the backward loop alone, and made once anyway
            making = seconds[by] if by >= 0 and by not in loop.first_steps else 0.0
            keep[b] = self._variable(length * (stacking(b) + making), length * size)
            if is_divided:
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
            if is_divided:
                self._excludes(part[w], redo[s])
        self.keeps.append(keep)
        self.parts.append(part)
        self.redos.append(redo)
        if not is_divided:
            return
        again = {s: self._variable(division.again * seconds[s], high=pure(s)) for s in steps}
        wanted = {b: self._variable(0.0) for b in early}
        often, at_once = division.carry_ins, division.carry_ins_at_once
        carry = {
            b: self._variable(often * stacking(b), at_once * program.buffers[b].nbytes)
            for b in loop.carried
        }
        for b in early:
            self._needs(part[b], wanted[b])
            self._needs(wanted[b], keep[b], again.get(program.producer[b]), carry.get(b))
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

    def least_seconds(self, limit: int | None) -> float:
        """Seconds that every solution takes at the least: those of the relaxation, whose variables
        have any value between their bounds."""
        found = self._solved(limit, fewest=False, integral=0)
        total = max(sum(self.costs), 1e-30)
        return found.fun * total / len(self.costs) if found.x is not None else math.inf

    def _solved(
        self, limit: int | None, fewest: bool, integral: int, below: float = math.inf
    ) -> optimize.OptimizeResult:
        """By HiGHS; the first `integral` variables are whole numbers."""
        count = len(self.costs)
        prices = np.asarray(self.costs) / max(sum(self.costs), 1e-30)
        if fewest:
            total = max(sum(self.counted.values()), 1)
            for i, n in self.counted.items():
                prices[i] += PARAMS.fewest_seconds * n / total
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
            prices * count,  # near 1 each, which HiGHS's tolerances suit
            integrality=np.arange(count) < integral,
            bounds=optimize.Bounds(np.asarray(self.lower), np.asarray(self.upper)),
            constraints=optimize.LinearConstraint(
                matrix, [low for *_, low, _ in rows], [high for *_, high in rows]
            ),
            options={"mip_rel_gap": PARAMS.residual_gap},
        )

    def solve(self, limit: int | None, fewest: bool, below: float = math.inf) -> Kept | None:
        """The best choice within `limit` bytes that takes no more seconds than `below`, if any."""
        if not self.costs:
            none = tuple(frozenset[int]() for _ in self.loops)
            return Kept(none, 0, 0.0, ((),) * len(none), none, (0,) * len(none))
        found = self._solved(limit, fewest, self.integral, below)
        if found.x is None:
            return None
        taken = found.x > 0.5
        chosen = lambda of: tuple(frozenset(b for b, i in each.items() if taken[i]) for each in of)
        whole, parts = chosen(self.keeps), chosen(self.parts)
        parts = tuple(part - keep for keep, part in zip(whole, parts, strict=True))
        each = tuple(sum(self.nbytes[i] for i in own if taken[i]) for own in self.own)
        seconds = sum(c for c, taken in zip(self.costs, taken, strict=True) if taken)
        kept = tuple(keep | part for keep, part in zip(whole, parts, strict=True))
        both = zip(self.every, parts, strict=True)
        every = tuple(tuple(lengths) if part else () for lengths, part in both)
        return Kept(kept, sum(each), seconds, every, parts, each)
