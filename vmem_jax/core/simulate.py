"""simulate: a Program, a Plan's order and Costs -> Timeline. The only place that predicts a peak."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Kind, Program


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What running an order costs.

    Attributes:
      order: the steps that ran, in order.
      start: seconds at which each begins.
      live_nbytes: bytes live while each runs, residents included.
      seconds: the end of the last.
      peak: bytes, the maximum of `live_nbytes` (the residents alone, if there is no step).
      peak_at: position in `order` of the first maximum, −1 if there is no step.
    """

    order: tuple[int, ...]
    start: tuple[float, ...]
    live_nbytes: tuple[int, ...]
    seconds: float
    peak: int
    peak_at: int


def last_reads(program: Program, order: Sequence[int]) -> list[list[int]]:
    """For each position the buffers that die after it: read there and not again before remade."""
    dying: list[list[int]] = [[] for _ in order]
    needed: set[int] = set()
    resident, steps = program.is_resident, program.steps
    for position in range(len(order) - 1, -1, -1):
        step = steps[order[position]]
        for b in step.writes:
            if b in needed:
                needed.discard(b)
            elif not resident[b]:
                dying[position].append(b)  # written and never read: dead on arrival
        for b in step.reads:
            if not resident[b] and b not in needed:
                needed.add(b)
                dying[position].append(b)
    return dying


def simulate(program: Program, order: Sequence[int], costs: Costs) -> Timeline:
    """Runs `order` on paper: one compute lane, exact liveness, in-place updates where allowed.

    While a step runs, its reads, writes and workspace are live together, except that a write takes
    over the memory of a dying read that `Step.in_place` pairs it with.
    """
    steps, buffers, resident = program.steps, program.buffers, program.is_resident
    dying = last_reads(program, order)
    base = live = program.resident_nbytes
    now, peak, peak_at = 0.0, base, -1
    start, history = [], []
    alive: set[int] = set()
    for position, s in enumerate(order):
        step = steps[s]
        dead = dying[position]
        for b in step.writes:
            if not resident[b] and b not in alive:
                alive.add(b)
                live += buffers[b].nbytes
        saved = 0
        if step.in_place:
            taken: set[int] = set()
            for r, w in step.in_place:
                if r in dead and not resident[w] and not {r, w} & taken:
                    taken |= {r, w}
                    saved += buffers[w].nbytes
        during = live - saved + step.workspace
        if during > peak or peak_at < 0:
            peak, peak_at = during, position
        start.append(now)
        history.append(during)
        now += costs.seconds[s]
        for b in dead:
            alive.discard(b)
            live -= buffers[b].nbytes
    return Timeline(tuple(order), tuple(start), tuple(history), now, peak, peak_at)


def live_at(program: Program, order: Sequence[int], position: int) -> list[int]:
    """The buffers that are live while the step at `position` runs, without the residents."""
    dying = last_reads(program, order)
    alive: set[int] = set()
    for p in range(position + 1):
        alive.update(b for b in program.steps[order[p]].writes if not program.is_resident[b])
        if p < position:
            alive.difference_update(dying[p])
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
