"""transfer_schedule: when each parked buffer leaves and returns, so that compute hides the copies.

The copies of a lane run first in, first out. A buffer is gone when its copy, begun after its last
use, has ended. Its fetch begins, counted backwards from its next use, when there is just time for it
and for the fetches after it. Hosted buffers have some more time, since XLA decides when their copies
start. Where memory is then over the limit, transfers in flight are hurried: a buffer goes earlier or
returns later, and the compute lane waits. Every point is before a heavy step, so that its fences cut
no fusion.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.policy.executor import Away
from vmem_jax.policy.params import PARAMS


def schedule_transfers(
    program: Program, order: Sequence[int], away: Sequence[Away], costs: Costs, limit: int
) -> Timeline:
    """Simulates `order` with the buffers of `away` in host memory, within `limit` bytes if possible.

    Intervals in which a buffer could not leave before it has to come back are kept on the device.
    """
    if not away or costs.link is None:
        return simulate(program, order, costs)
    heavy = [p for p, s in enumerate(order) if not program.steps[s].fusible]
    best = None
    timeline = simulate(program, order, costs)
    for _ in range(PARAMS.point_rounds):
        transfers = _unhurried(program, timeline, away, costs, heavy)
        timeline = _within(program, order, transfers, costs, limit, heavy)
        if best is None or rank(timeline, limit) < rank(best, limit):
            best = timeline
        if not any(timeline.stalls):
            break
    assert best is not None
    return best


def stream(
    program: Program, order: Sequence[int], away: Sequence[Away], costs: Costs, limit: int
) -> Timeline:
    """As `schedule_transfers`, with the hosted inputs and outputs of `program` as well."""
    streamed = {b: [len(order), 0] for b in program.streamed_in | program.streamed_out}
    for position, s in enumerate(order):
        for b in program.steps[s].reads:
            if b in program.streamed_in:
                streamed[b][0] = min(streamed[b][0], position)
        for b in program.steps[s].writes:
            if b in program.streamed_out and not streamed[b][1]:
                streamed[b][1] = position + 1
    hosted = [
        Away(b, 0, first) if b in program.streamed_in else Away(b, made, len(order))
        for b, (first, made) in sorted(streamed.items())
    ]
    return schedule_transfers(program, order, [*away, *hosted], costs, limit)


def rank(timeline: Timeline, limit: int) -> tuple[bool, float, int]:
    """The rank of a timeline: fitting ones by seconds, then the others by peak."""
    over = timeline.peak > limit
    return over, timeline.peak if over else timeline.seconds, timeline.peak


def _unhurried(
    program: Program,
    timeline: Timeline,
    away: Sequence[Away],
    costs: Costs,
    heavy: Sequence[int],
) -> list[Transfer]:
    """The points without waits, as far as possible."""
    assert costs.link is not None
    begins = (*timeline.start, timeline.seconds)
    nbytes = lambda a: program.buffers[a.buffer].nbytes
    lead = PARAMS.stream_lead * timeline.seconds
    starts, gones = {}, {}
    free = 0.0
    for a in sorted(away, key=lambda a: (a.since, a.buffer)):
        if a.buffer in program.streamed_in:
            starts[a] = gones[a] = 0
            continue
        start = _heavy_from(heavy, a.since, a.until)
        free = max(free, begins[start]) + PARAMS.copy_seconds * nbytes(a) / costs.link.out
        starts[a] = start
        late = free + (lead if a.buffer in program.streamed_out else 0.0)
        gones[a] = _heavy_from(heavy, bisect.bisect_left(begins, late), a.until)
    found = []
    free = timeline.seconds
    for a in sorted(away, key=lambda a: (-a.until, a.buffer)):
        if a.buffer in program.streamed_out:
            found.append(Transfer(a.buffer, starts[a], gones[a], len(timeline.start), a.until))
            continue
        back = _heavy_until(heavy, a.until, starts[a])
        free = min(free, begins[back]) - PARAMS.copy_seconds * nbytes(a) / costs.link.into
        early = free - (lead if a.buffer in program.streamed_in else 0.0)
        latest = max(bisect.bisect_right(begins, early) - 1, 0)
        fetch = _heavy_until(heavy, latest, starts[a])
        gone = min(gones[a], back)
        if gone > fetch:  # no time for both: they meet where the slower of the two would end
            gone = fetch = _heavy_until(heavy, (gone + fetch) // 2, starts[a])
        found.append(Transfer(a.buffer, starts[a], gone, fetch, back))
    return sorted(found, key=lambda t: (t.start, t.buffer))


def _heavy_from(heavy: Sequence[int], position: int, most: int) -> int:
    """The first heavy position from `position` on, no later than `most`."""
    i = bisect.bisect_left(heavy, position)
    return min(heavy[i], most) if i < len(heavy) else most


def _heavy_until(heavy: Sequence[int], position: int, first: int) -> int:
    """The last heavy position up to `position`, no earlier than `first`."""
    i = bisect.bisect_right(heavy, position)
    return max(heavy[i - 1], first) if i else first


def _within(
    program: Program,
    order: Sequence[int],
    transfers: list[Transfer],
    costs: Costs,
    limit: int,
    heavy: Sequence[int],
) -> Timeline:
    """The timeline of `transfers`, hurried at the positions where memory is over `limit`."""
    live = np.array(simulate(program, order, costs, transfers).live_nbytes)
    nbytes = [program.buffers[t.buffer].nbytes for t in transfers]
    start, gone, fetch, back = (
        np.array([(t.start, t.gone, t.fetch, t.back) for t in transfers], np.int64).reshape(-1, 4).T
    )
    # the first that left are nearest to the host, and those needed last can come last
    by_start = np.argsort(start, kind="stable")
    by_back = np.argsort(-back, kind="stable")
    for p in np.flatnonzero(live > limit).tolist():  # elsewhere it only falls
        for i in by_back[(fetch[by_back] <= p) & (p < back[by_back])].tolist():
            if live[p] > limit:
                later = _heavy_from(heavy, p + 1, int(back[i]))
                live[fetch[i] : later] -= nbytes[i]
                fetch[i] = later
        for i in by_start[(start[by_start] <= p) & (p < gone[by_start])].tolist():
            if live[p] > limit:
                earlier = _heavy_until(heavy, p, int(start[i]))
                live[earlier : gone[i]] -= nbytes[i]
                gone[i] = earlier
    hurried = [
        dataclasses.replace(t, gone=g, fetch=f)
        for t, g, f in zip(transfers, gone.tolist(), fetch.tolist(), strict=True)
    ]
    streamed = program.streamed_in | program.streamed_out
    kept = [t for t in hurried if t.gone < t.fetch or t.buffer in streamed]
    return simulate(program, order, costs, kept)
