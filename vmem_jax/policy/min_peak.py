"""min_peak: the minimum peak, for the error of a budget that cannot be met."""

from __future__ import annotations

import math
from collections.abc import Callable

from vmem_jax.core.liveness import least_nbytes
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline
from vmem_jax.policy.params import PARAMS


def lowest(program: Program, keeps: Timeline, attempt: Callable[[int], Timeline]) -> Timeline:
    """The run with the lowest peak that `attempt` reaches under any limit.

    A run under a limit far too low does not show how low a peak can be. So the limit is bisected, on
    a logarithmic scale, between limits that are met and limits that are not.

    Args:
      keeps: the run without a limit.
      attempt: bytes -> the run under that limit, or one that misses it.
    """
    best = keeps
    missed, met = least_nbytes(program) - 1, best.peak
    while met > max(PARAMS.lowest_close * missed, missed + 1):
        limit = max(math.isqrt(missed * met), missed + 1)
        found = attempt(limit)
        best = min(best, found, key=lambda timeline: (timeline.peak, timeline.seconds))
        met = min(met, found.peak)
        if found.peak > limit:
            missed = limit
    return best
