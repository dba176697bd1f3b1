"""hosted_slices: an iteration of a loop whose slices of state come from host memory and return.

All slices start to come when the iteration begins, one after another, in the order in which its body
has them. One leaves as soon as it is made and those before it have left. The next iteration begins
when all have left. So an iteration waits for the slices that its first update reads, and for what its
last one writes.

XLA begins to fetch most slices later (`capture.hosted_pace`): a step of a scanned decoder of 7
billion weights takes 2.72 s for the 2.68 that are predicted (H200).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vmem_jax.core.program import Step


def iteration_seconds(
    body: Sequence[Step], seconds: Callable[[Step], float], link_in: float, link_out: float
) -> float:
    """Seconds of an iteration, with its copies.

    Args:
      body: its steps, in order. Those that fetch or return bytes, and are no loops, are copies.
      seconds: of what computes. A step without any, a barrier for instance, is done as soon as what
        it reads is there.
      link_in, link_out: bytes a second from host memory, and to it.
    """
    ready: dict[int, float] = {}  # when what is made is there
    computed = came = left = 0.0
    for step in body:
        at = max((ready.get(b, 0.0) for b in step.reads), default=0.0)
        if step.fetched and not step.body:
            at = came = max(came, at) + step.fetched / link_in
        elif step.returned and not step.body:
            at = left = max(left, at) + step.returned / link_out
        elif takes := seconds(step):
            at = computed = max(computed, at) + takes
        ready.update(dict.fromkeys(step.writes, at))
    return max(computed, came, left)
