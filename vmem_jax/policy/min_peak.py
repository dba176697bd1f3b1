"""min_peak: the minimum peak, for the message about a budget that is out of reach."""

from __future__ import annotations

import math
from collections.abc import Callable

from vmem_jax.core.liveness import least_nbytes
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline

_CLOSE = 1.02
"""The limits that are met and missed end this near to each other."""


def lowest(program: Program, keeps: Timeline, attempt: Callable[[int], Timeline]) -> Timeline:
    """The run with the lowest peak that `attempt` comes to under any limit.

    A search under a limit far below what can be met gives no sign of how low a peak gets. So the
    limit is halved, as a ratio, between what is met and what is not.

    Args:
      keeps: the run that does nothing for a limit.
      attempt: bytes -> the run under that limit, or one that misses it.
    """
    best = keeps
    missed, met = least_nbytes(program) - 1, best.peak
    while met > max(_CLOSE * missed, missed + 1):
        limit = max(math.isqrt(missed * met), missed + 1)
        found = attempt(limit)
        best = min(best, found, key=lambda timeline: (timeline.peak, timeline.seconds))
        met = min(met, found.peak)
        if found.peak > limit:
            missed = limit
    return best
