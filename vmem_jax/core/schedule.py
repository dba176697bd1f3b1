"""schedule: what a plan does, one event after another: steps, barriers, the points of transfers.

`rewrite` emits these events, `heap` predicts the memory that they take, and `stays` tells reports and
the layout of host memory when a value is where. So each of these facts is derived in one place.
`validate` does not read it, and `simulate`, which a search calls thousands of times, has arrays.

XLA orders by data dependence alone. So what goes into a point of a transfer goes through a barrier
together with the running values, and what comes out of our own calls goes through another: nothing
behind the point starts before it is issued, and it is not issued before what stands in front of it.
Points of one kind at one position share their barriers.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence

from vmem_jax.core.fences import fences
from vmem_jax.core.liveness import last_reads, staged_spans
from vmem_jax.core.plan import Transfer, points_at
from vmem_jax.core.program import Program
from vmem_jax.core.spines import spines


class Do(enum.StrEnum):
    """What an event does."""

    RUN = "run"
    BARRIER = "barrier"
    START = "start"
    GONE = "gone"
    FETCH = "fetch"
    BACK = "back"
    FREE = "free"


POINTS = (Do.START, Do.GONE, Do.FETCH, Do.BACK)
"""The points of a transfer, in their order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
      do: what it does.
      position: in the order, of the step before which it stands; of `RUN` that of its step, behind
        which the barrier of a clamp and `FREE` stand. The end of the order is one, too.
      index: the step of `RUN`, the transfer of a point; −1 else.
      buffers: of `BARRIER` what is held, of `RUN` and `FREE` what is not needed on the device behind
        its step, of a point the buffer that moves.
      transfers: of `BARRIER` those of which it holds what their last point returned, or, in front of
        `START`, the buffer that leaves.
    """

    do: Do
    position: int
    index: int = -1
    buffers: tuple[int, ...] = ()
    transfers: tuple[int, ...] = ()


def actions(
    program: Program, order: Sequence[int], transfers: Sequence[Transfer] = ()
) -> Iterator[Event]:
    """The events of `order` with `transfers` without barriers: what happens, whoever emits it."""
    points, dying = points_at(program, transfers), last_reads(program, order)
    for b, (_, last) in staged_spans(program, order, transfers).items():
        dying[last].append(b)
    for position in range(len(order) + 1):
        for point, i in points.get(position, ()):
            yield Event(POINTS[point], position, i, (transfers[i].buffer,))
        if position < len(order):
            dead = tuple(dying[position])
            yield Event(Do.RUN, position, order[position], dead)
            if dead:
                yield Event(Do.FREE, position, buffers=dead)


def schedule(
    program: Program,
    order: Sequence[int],
    transfers: Sequence[Transfer] = (),
    *,
    looped: Sequence[int] = (),
    fenced: bool = True,
    own: bool = True,
    body: bool = False,
    as_made: bool = True,
) -> tuple[Event, ...]:
    """The events of `order` with `transfers`.

    Args:
      looped: stacks that no barrier holds, since their slices are in host memory.
      fenced: whether barriers hold XLA to the order.
      own: whether what is not hosted moves by our own calls, which are fenced in front of a start and
        behind every point. XLA's own copies are fenced in front of the other points alone.
      body: whether `program` is the body of a loop.
      as_made: whether a barrier holds values in the order in which they are made, as XLA:GPU makes
        them where nothing else decides; and whether casts of weights and zeros are held back, which
        it makes at the start. XLA:CPU does better with the spine in front: a ResNet of
        eleven layers needs 7.6 MiB so, and 8.1 otherwise (0.10.2).
    """
    parts = program, order, transfers, looped, fenced, own, body, as_made
    return tuple(_Scheduler(*parts).events())


class _Scheduler:
    def __init__(
        self,
        program: Program,
        order: Sequence[int],
        transfers: Sequence[Transfer],
        looped: Sequence[int],
        fenced: bool,
        own: bool,
        body: bool,
        as_made: bool,
    ) -> None:
        self.program, self.order, self.transfers, self.fenced = program, order, transfers, fenced
        self.as_made = as_made
        self.own = {i for i, t in enumerate(transfers) if own and t.buffer not in program.hosted}
        points = points_at(program, transfers)
        away = {p: {*looped, *self._away(p)} for p in sorted(points)}
        self.spines = spines(program, order, away)
        found = fences(program, order, body=body, early=as_made) if fenced else ()
        self.fences: dict[int, tuple[int, ...]] = {}
        for fence in found:  # a buffer on its way is fenced by its own calls
            gone = self._away(fence.position)
            held = tuple(b for b in fence.buffers if b not in gone)
            self.fences[fence.position] = held

    def events(self) -> Iterator[Event]:
        made: dict[int, int] = {}  # buffer -> the position at which it was last written
        every = actions(self.program, self.order, self.transfers)
        for (position, do), group in itertools.groupby(every, lambda e: (e.position, e.do)):
            if held := self.fences.pop(position, ()):
                if self.as_made:
                    held = tuple(sorted(held, key=lambda b: made.get(b, -1)))
                yield Event(Do.BARRIER, position, buffers=held)
            if do in POINTS:
                yield from self._moves(tuple(group))
            elif do is Do.RUN:
                [run] = group
                step = self.program.steps[run.index]
                if self.fenced and step.tied:
                    yield Event(Do.BARRIER, position, buffers=step.tied)
                yield run
                made.update(dict.fromkeys(step.writes, position))
                if self.fenced and step.compared:
                    yield Event(Do.BARRIER, position, buffers=step.compared)
            else:
                yield from group

    def _moves(self, points: Sequence[Event]) -> Iterator[Event]:
        """Points of one kind at one position, between their barriers."""
        do, position = points[0].do, points[0].position
        moved = tuple(event.index for event in points)
        own = tuple(i for i in moved if i in self.own)
        # XLA's own copies have no slots that another tensor may still hold, and start where their
        # source is made
        yield from self._barrier(position, own if do is Do.START else moved)
        yield from points
        # behind `back`, too: its slot in host memory may be another tensor's from here on
        yield from self._barrier(position, own)

    def _barrier(self, position: int, moved: tuple[int, ...]) -> Iterator[Event]:
        if moved:
            buffers = self.spines.get(position, ())
            yield Event(Do.BARRIER, position, buffers=buffers, transfers=moved)

    def _away(self, position: int) -> set[int]:
        return {t.buffer for t in self.transfers if t.start <= position <= t.back}
