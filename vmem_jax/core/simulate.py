"""simulate: a Program, an order with its transfers, and Costs -> Timeline. Peaks are predicted only
here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from vmem_jax.core.costs import Costs
from vmem_jax.core.lanes import Copy, Lanes
from vmem_jax.core.liveness import live_nbytes, lives, staged_spans
from vmem_jax.core.plan import Transfer, points_at
from vmem_jax.core.program import Kind, Program


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """A wait of the compute lane for a copy, in seconds since the start of the step.

    Attributes:
      transfer: the transfer that is waited for, an index into `Timeline.transfers`.
      direction: the lane of its copy, "out" or "into".
    """

    transfer: int
    direction: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The predicted execution of an order.

    Attributes:
      order: the steps that ran, in order.
      start: seconds at which each step begins.
      live_nbytes: bytes live while each step runs, residents included.
      seconds: the end of the last step.
      peak: bytes, the maximum of `live_nbytes` (the residents alone, if there is no step).
      peak_at: position in `order` of the first maximum, −1 if there is no step.
      transfers: the given transfers.
      copies: for each transfer its copy out and its copy back on the lanes; a hosted buffer has no
        time for the direction that it does not go.
      stalls: seconds that the compute lane waits for each transfer, out and back together.
      waits: each of those waits, in chronological order.
    """

    order: tuple[int, ...]
    start: tuple[float, ...]
    live_nbytes: tuple[int, ...]
    seconds: float
    peak: int
    peak_at: int
    transfers: tuple[Transfer, ...] = ()
    copies: tuple[tuple[Copy, Copy], ...] = ()
    stalls: tuple[float, ...] = ()
    waits: tuple[Stall, ...] = ()


def simulate(
    program: Program, order: Sequence[int], costs: Costs, transfers: Sequence[Transfer] = ()
) -> Timeline:
    """Simulates `order`: three lanes, exact liveness, in-place updates where allowed.

    While a step runs, its reads, writes and workspace are live together, except that a write takes
    over the memory of a dying read that `Step.in_place` pairs it with. A transferred buffer is live
    until `gone` and from `fetch` on, whether its bytes have arrived or not. A hosted buffer without a
    transfer is live while it is used, and takes no time. A step that starts during a copy takes
    `Link.delay` longer.
    """
    live = program.resident_nbytes + live_nbytes(program, order)
    live += staged_nbytes(program, order, transfers)
    if not transfers:
        start, now = _starts(order, costs)
        return _timeline(order, start, live, now, program.resident_nbytes)
    away = np.zeros(len(live) + 1, np.int64)
    for t in transfers:
        if t.buffer not in program.hosted:
            away[t.gone] += program.buffers[t.buffer].nbytes
            away[t.fetch] -= program.buffers[t.buffer].nbytes
    live -= np.cumsum(away)[:-1]
    moves, start, now = _Moves(program, costs, transfers), list[float](), 0.0
    for position, s in enumerate(order):
        if position in moves.at:
            now = moves.pass_(position, now)
        now += moves.delay(now)
        start.append(now)
        now += costs.seconds[s]
    if len(order) in moves.at:  # hosted outputs that leave at the end
        now = moves.pass_(len(order), now)
    return moves.finish(_timeline(order, start, live, now, program.resident_nbytes))


def _starts(order: Sequence[int], costs: Costs) -> tuple[list[float], float]:
    """The seconds at which each step of `order` begins without waits, and the end of the last."""
    seconds = np.array(costs.seconds)[np.asarray(order, np.int64)]
    ends = np.cumsum(seconds).tolist()
    return [0.0, *ends][: len(ends)], ends[-1] if ends else 0.0


def _timeline(
    order: Sequence[int], start: Sequence[float], live: np.ndarray, end: float, resident: int
) -> Timeline:
    at = int(live.argmax()) if len(live) else -1
    peak = int(live[at]) if len(live) else resident
    return Timeline(tuple(order), tuple(start), tuple(live.tolist()), end, peak, at)


class _Moves:
    """The transfers of one run: the copies and waits before each position, on both lanes."""

    def __init__(self, program: Program, costs: Costs, transfers: Sequence[Transfer]) -> None:
        if costs.link is None:
            raise ValueError("there are transfers, but these costs have no link")
        self.transfers = tuple(transfers)
        self.nbytes = [program.buffers[t.buffer].nbytes for t in transfers]
        self.link, self.lanes = costs.link, Lanes(costs.link)
        self.stalls = [0.0] * len(transfers)
        self.waits: list[Stall] = []
        self.at = points_at(program, transfers)

    def pass_(self, position: int, now: float) -> float:
        """Seconds after the waits."""
        for point, i in self.at[position]:
            if point in (0, 2):
                self.lanes.submit("into" if point else "out", i, self.nbytes[i], now)
            else:
                direction = "out" if point == 1 else "into"
                then = self.lanes.wait(direction, i, now)
                if then > now:
                    self.stalls[i] += then - now
                    self.waits.append(Stall(i, direction, now, then))
                now = then
        return now

    def delay(self, now: float) -> float:
        """Seconds by which the step that begins now starts later, beside what is copied."""
        return self.link.delay if self.link.delay and self.lanes.is_busy(now) else 0.0

    def finish(self, timeline: Timeline) -> Timeline:
        copies = self.lanes.copies
        still = Copy(0.0, 0.0)  # of what only comes, or only leaves
        pairs = tuple(
            (copies.get(("out", i), still), copies.get(("into", i), still))
            for i in range(len(self.transfers))
        )
        return dataclasses.replace(
            timeline,
            transfers=self.transfers,
            copies=pairs,
            stalls=tuple(self.stalls),
            waits=tuple(self.waits),
        )


def staged_nbytes(
    program: Program, order: Sequence[int], transfers: Sequence[Transfer] = ()
) -> np.ndarray:
    """For each position the bytes of hosted buffers that are on the device while its step runs."""
    staged = np.zeros(len(order), np.int64)
    if program.hosted:
        for b, (first, last) in staged_spans(program, order, transfers).items():
            staged[first : last + 1] += program.buffers[b].nbytes
    return staged


def live_at(
    program: Program, order: Sequence[int], position: int, transfers: Sequence[Transfer] = ()
) -> list[int]:
    """The buffers that are live while the step at `position` runs, without the residents.

    Hosted buffers that are on the device there are among them. `stays.live_during` says the same by
    the events of a schedule, and takes some seventy times as long.
    """
    found = lives(program, order)
    alive = {*found.buffer[(found.first <= position) & (position <= found.last)].tolist()}
    alive.difference_update(t.buffer for t in transfers if t.gone <= position < t.fetch)
    if program.hosted:
        spans = staged_spans(program, order, transfers)
        alive.update(b for b, (first, last) in spans.items() if first <= position <= last)
    return sorted(alive)


def nbytes_by_kind(program: Program, buffers: Sequence[int]) -> dict[Kind, int]:
    """Bytes of `buffers` by kind, largest first."""
    total: dict[Kind, int] = functools.reduce(
        lambda acc, b: {
            **acc,
            program.buffers[b].kind: acc.get(program.buffers[b].kind, 0)
            + program.buffers[b].nbytes,
        },
        buffers,
        {},
    )
    return dict(sorted(total.items(), key=lambda item: -item[1]))
