"""heap: predicts the bytes of XLA's heap for a plan, before it is compiled.

XLA gives every buffer one offset for its live range. It allocates them by size, the largest first, or
by length of live range, whichever heap is smaller, each in the smallest gap that is free all that
time (GlobalDecreasingSizeBestFitHeap in XLA's heap_simulator.h). Its clock counts allocations and
frees, which decides between buffers of one size. Buffers of many sizes whose live
ranges cross, such as those that leave and return, leave gaps. The heap is then up to a third larger
than the most bytes live at once, which `simulate` predicts and policies plan with.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vmem_jax.core.filters import transposed_filters
from vmem_jax.core.liveness import taken_over
from vmem_jax.core.packing import Interval
from vmem_jax.core.params import PARAMS
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import BEGIN, END, Phase, Program, Step
from vmem_jax.core.schedule import Do, Event, schedule


def heap_nbytes(
    program: Program,
    order: Sequence[int],
    transfers: Sequence[Transfer] = (),
    events: Sequence[Event] | None = None,
    as_run: bool = False,
    early: bool = False,
) -> int:
    """Bytes of device memory that `order` needs on XLA's heap, residents included; `events`, `as_run`
    and `early` as in `intervals`."""
    found = intervals(program, order, transfers, events, as_run, early)
    return program.resident_nbytes + best_fit_nbytes(found)


def intervals(
    program: Program,
    order: Sequence[int],
    transfers: Sequence[Transfer] = (),
    events: Sequence[Event] | None = None,
    as_run: bool = False,
    early: bool = False,
) -> list[Interval]:
    """The interval of positions of `order` in which each slot of the heap is in use; residents have
    none, nor does what is put into one of theirs.

    What takes over the memory of a dying read has its slot; what leaves and comes back has two. XLA
    writes over nothing that it reads through a barrier, so what is fenced or was moved keeps its
    slot, but for the totals of a loop, which have one for all of its iterations.

    Args:
      events: what is emitted, where that is of another program than this one.
      as_run: whether it is the order in which XLA runs them (`core.run_order`).
      early: whether filters are transposed as early as that may be (`core.filters`).
    """
    events = schedule(program, order, transfers) if events is None else events
    filters = transposed_filters(program, order, as_run, events if early else ())
    copies = {b for each in filters for b in each.reversed}
    nbytes = [0 if b in copies else x.nbytes for b, x in enumerate(program.buffers)]
    heap = _Heap(program, nbytes, merged(program, events))
    for event in events:
        heap.take(event)
    assert not heap.since, "what is never freed is resident"
    found = heap.found + _padded_inputs(program, order)
    found += [each.copy for each in filters]
    left = [each.slot for each in filters if each.slot is not None]
    return elsewhere((interval for interval in found if interval.nbytes), left)


def merged(program: Program, events: Sequence[Event]) -> dict[int, int]:
    """Positions of elementwise steps of the backward pass, each with that of an earlier one with
    which XLA makes one kernel: both read the same large value, neither waits for the other, and no
    barrier is between the later one and what it reads. What both make is there with all that they
    read.
    """
    found: dict[int, int] = {}
    there: dict[int, float] = {}  # buffer -> where it was made, or went through a barrier
    before: list[tuple[int, Step]] = []
    for event in events:
        if event.do is Do.BARRIER:
            there.update(dict.fromkeys(event.buffers, event.position - 0.5))
        if event.do is not Do.RUN:
            continue
        step = program.steps[event.index]
        if step.phase is Phase.BACKWARD and step.fusible and len(step.writes) == 1:
            size = program.buffers[step.writes[0]].nbytes
            last = max((there.get(r, -1) for r in step.reads), default=-1)
            for position, other in reversed(before):
                if position <= last:
                    break
                shared = {*step.reads}.intersection(other.reads)
                same = program.buffers[other.writes[0]].nbytes == size
                several = len(step.equations) > 1 or len(other.equations) > 1
                if same and several and any(program.buffers[r].nbytes == size for r in shared):
                    found[event.position] = found.get(position, position)
                    break
            before.append((event.position, step))
        there.update(dict.fromkeys(step.writes, event.position))
    return found


class _Heap:
    """What is in the heap, event by event.

    Attributes:
      since: of what is there the position at which its slot was taken.
      found: the slots that are free again.
    """

    def __init__(self, program: Program, nbytes: Sequence[int], merged: Mapping[int, int]) -> None:
        self._program, self._nbytes, self._hosted = program, nbytes, {*program.hosted}
        self._merged = merged
        self._behind: set[int] = set()  # what is read through a barrier from here on
        self._moved: set[int] = set()
        self._handed: dict[int, tuple[int, ...]] = {}  # where it was taken over since then
        self.since: dict[int, int] = {}
        self.found: list[Interval] = []

    def take(self, event: Event) -> None:
        if event.do is Do.BARRIER:
            self._behind.update(event.buffers)
        elif event.do is Do.START:
            self._moved.update(event.buffers)
        elif event.do is Do.GONE and event.buffers[0] not in self._hosted:
            self._free(event.buffers[0], event.position - 1)
        elif event.do is Do.FETCH:
            self.since[event.buffers[0]] = event.position
        elif event.do is Do.RUN:
            self._run(event)
        elif event.do is Do.FREE:
            for b in event.buffers:
                if b in self.since:
                    self._free(b, event.position)

    def _free(self, b: int, last: int) -> None:
        first = self.since.pop(b)
        if first <= last:  # what comes and leaves before the same step takes no slot
            self.found.append(Interval(self._nbytes[b], first, last, self._handed.pop(b, ())))

    def _run(self, event: Event) -> None:
        program, position = self._program, event.position
        step = program.steps[event.index]
        for r, w in taken_over(program, step, event.buffers).items():
            is_total = program.steps[program.producer[r]].op == BEGIN
            elementwise = step.fusible and step.op != END  # what is updated where it lies is not
            apart = elementwise and not is_total and (r in self._behind or r in self._moved)
            if r in self.since and w not in self.since and not apart:
                self.since[w] = self.since.pop(r)
                self._handed[w] = (*self._handed.pop(r, ()), position)
        self._behind.difference_update(step.writes)
        for w in step.writes:
            if not program.is_resident[w]:
                self.since.setdefault(w, self._merged.get(position, position))
        for b in (*step.reads, *step.writes) if self._hosted else ():
            if b in self._hosted:
                self.since.setdefault(b, position)
        if step.workspace:
            self.found.append(Interval(step.workspace, position, position))


def _padded_inputs(program: Program, order: Sequence[int]) -> list[Interval]:
    """Where XLA keeps the padded copy of an argument between the convolutions that read it.

    No fence stands before an argument, so one copy is made for all. While one of them runs the copy
    is in its workspace.
    """
    used: dict[tuple[int, int], list[int]] = {}
    for position, s in enumerate(order):
        convolution = program.steps[s].convolution
        if convolution is not None and convolution.padded_nbytes:
            for b in program.steps[s].reads:
                is_x = program.buffers[b].nbytes == convolution.x_nbytes
                if is_x and b in program.inputs:
                    used.setdefault((b, convolution.padded_nbytes), []).append(position)
    between = [(nbytes, at[0] + 1, at[-1] - 1) for (_, nbytes), at in used.items()]
    return [Interval(*each) for each in between if each[1] <= each[2]]


def elsewhere(intervals: Iterable[Interval], free: Sequence[Interval]) -> list[Interval]:
    """Those of `intervals` for which no slot is free as long as they live.

    XLA asks for each, the largest first, the smallest slot that holds it, and the latest of those.
    """
    free = sorted(free, key=lambda slot: (slot.nbytes, -slot.first))
    nbytes, first, last = (
        np.array([getattr(slot, name) for slot in free], np.int64)
        for name in ("nbytes", "first", "last")
    )
    taken: list[list[Interval]] = [[] for _ in free]  # of each slot, in turn
    left = []
    for one in sorted(intervals, key=lambda i: (-i.nbytes, i.first)):
        fits = (nbytes >= one.nbytes) & (first <= one.first) & (last >= one.last)
        for slot in np.flatnonzero(fits)[: PARAMS.heap_offsets].tolist():
            there = taken[slot]
            at = bisect.bisect(there, one.last, key=lambda other: other.first)
            if not at or there[at - 1].last < one.first:
                there.insert(at, one)
                break
        else:
            left.append(one)
    return left


def best_fit_nbytes(intervals: Sequence[Interval]) -> int:
    """Bytes of the heap that holds `intervals`, of both orders in which XLA places them.

    XLA's time is the number of allocations and frees so far, and of values that share a slot it
    compares the first one's time in the order by size, that of all in the other.
    """
    first = np.array([i.first for i in intervals], np.int64)
    last = np.array([i.last for i in intervals], np.int64)
    nbytes = np.array([i.nbytes for i in intervals], np.int64)
    begin, handed, end = _ticks(intervals)
    by_size = np.lexsort((begin, begin - handed, -nbytes))
    by_span = np.lexsort((begin, -nbytes, begin - end))
    packed = lambda order: _packed_nbytes(first[order], last[order], nbytes[order])
    return min(packed(by_size), packed(by_span))


def _ticks(intervals: Sequence[Interval]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When each interval begins, when the first value in it ends, and when the last one does, by the
    number of allocations and frees before. What a kernel writes is allocated before anything that it
    reads is freed; to take a slot over is a free and an allocation."""
    allocations = ((each.first, 0, i) for i, each in enumerate(intervals))
    handovers = ((at, 0, i) for i, each in enumerate(intervals) for at in each.handed)
    frees = ((each.last, 1, i) for i, each in enumerate(intervals))
    begin, handed, end = np.full((3, len(intervals)), -1, np.int64)
    tick = 0
    for _, is_free, i in sorted((*allocations, *handovers, *frees)):
        if begin[i] < 0:
            begin[i] = tick
        else:
            handed[i] = tick if handed[i] < 0 else handed[i]
            end[i] = tick
            tick += not is_free  # what takes over is allocated, too
        tick += 1
    return begin, handed, end


def _packed_nbytes(first: np.ndarray, last: np.ndarray, nbytes: np.ndarray) -> int:
    """Bytes of the heap, each put into the smallest gap that holds it, or on top."""
    packed = np.zeros((4, len(nbytes)), np.int64)  # from the bottom up
    for i in range(len(nbytes)):
        since, until, begin, end = packed[:, :i]
        meets = (since <= last[i]) & (until >= first[i])
        tops = np.zeros(np.count_nonzero(meets) + 1, np.int64)  # of what lies below each gap
        np.maximum.accumulate(end[meets], out=tops[1:])
        gaps = begin[meets] - tops[:-1]
        holding = np.flatnonzero(gaps >= nbytes[i])
        here = tops[holding[np.argmin(gaps[holding])] if len(holding) else -1]
        at = np.searchsorted(begin, here)
        packed[:, at + 1 : i + 1] = packed[:, at:i]
        packed[:, at] = first[i], last[i], here, here + nbytes[i]
    return int(packed[3].max(initial=0))
