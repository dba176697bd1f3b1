"""offload_choice: which idle values to move to host memory, and which moves a plan does not need.

Values are ordered by the seconds that recomputing them takes for their size. As many of them are
moved
as compute hides: they leave in the forward pass and are back when they are read, and nothing waits.
How many that are is found by scheduling them (`schedule_transfers`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vmem_jax.core.costs import Costs
from vmem_jax.core.program import COMPRESS, DECOMPRESS, Program
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.recomputation import Drop, Recomputation
from vmem_jax.policy.transfer_schedule import schedule_transfers


def candidates(
    recomputation: Recomputation, costs: Costs, share: float, *, waiting: bool = False
) -> list[Drop]:
    """Idle intervals that are worth a transfer, the most expensive to recompute per byte first.

    Args:
      share: values below this share of all temporaries are not worth four fences.
      waiting: whether to include intervals that are too short for both copies.
    """
    assert costs.link is not None
    program, base = recomputation.program, recomputation.base
    resident = program.is_resident
    stands_for = _stands_for(program)
    smallest = max(share * sum(n for b, n in enumerate(stands_for) if not resident[b]), 1)
    timeline = simulate(program, base, costs)
    found = []
    for b, uses in enumerate(recomputation.uses):
        nbytes = program.buffers[b].nbytes
        if resident[b] or not program.buffers[b].movable or stands_for[b] < smallest:
            continue
        if program.producer[b] < 0 or len(uses) < 2:
            continue
        begins = [timeline.start[use] for use in uses]
        idle, n = max((end - begin, n) for n, (begin, end) in enumerate(itertools.pairwise(begins)))
        if waiting or idle > nbytes / costs.link.out + nbytes / costs.link.into:
            again = costs.seconds[program.producer[b]]
            if not recomputation.may_drop(b, uses[n + 1]):
                again = float("inf")
            found.append((-again / nbytes, b, n))
    return [(b, n) for _, b, n in sorted(found)]


def _stands_for(program: Program) -> list[int]:
    """Bytes of every buffer before compression: a compressed buffer is worth as much as its value."""
    found = list(program.uncompressed_nbytes)
    for step in program.steps:
        if step.op == COMPRESS:
            found[step.reads[0]] = 0
        elif step.op == DECOMPRESS:
            found[step.writes[0]] = 0
    return found


def hidden(recomputation: Recomputation, costs: Costs, parks: Sequence[Drop]) -> list[Drop]:
    """As many of `parks` as move without a wait, the first ones first."""
    program = recomputation.program
    unlimited = sum(b.nbytes for b in program.buffers)
    tries = PARAMS.hidden_tries

    def hides(wanted: Sequence[Drop]) -> bool:
        run = Execution(
            program, costs, recomputation.base, recomputation=recomputation, parks=wanted
        )
        timeline = schedule_transfers(program, run.order, run.away, costs, unlimited)
        waits = sum(timeline.stalls) > PARAMS.hidden_waits * timeline.seconds
        return len(timeline.transfers) == len(wanted) and not waits

    chosen: list[Drop] = []
    blocks = [list(parks)]
    while blocks and tries:
        block = blocks.pop()
        tries -= 1
        if not block or hides(chosen + block):
            chosen += block
        elif len(block) > 1:
            middle = len(block) // 2
            blocks += [block[middle:], block[:middle]]
    return chosen


def without_idle_moves(program: Program, timeline: Timeline, costs: Costs, limit: int) -> Timeline:
    """`timeline` without the transfers that it does not need to stay within `limit`."""
    if not timeline.transfers or timeline.peak > limit:
        return timeline
    live = list(timeline.live_nbytes)
    kept = []
    # what waits most for the link first, then the smallest
    stalls = dict(zip(timeline.transfers, timeline.stalls, strict=True))
    nbytes = {t: program.buffers[t.buffer].nbytes for t in timeline.transfers}
    for t in sorted(timeline.transfers, key=lambda t: (-stalls[t], nbytes[t])):
        if max(live[t.gone : t.fetch]) + nbytes[t] <= limit:
            for p in range(t.gone, t.fetch):
                live[p] += nbytes[t]
        else:
            kept.append(t)
    lighter = simulate(program, timeline.order, costs, sorted(kept, key=lambda t: t.start))
    return lighter if lighter.peak <= limit else timeline
