"""lowest: how low recomputation brings the peak, for what a policy says of a budget out of reach."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline, least_nbytes, simulate
from vmem_jax.policy.executor import Execution

_CLOSE = 1.02
"""The limits that are met and missed end this near to each other."""


def lowest(program: Program, costs: Costs, base: Sequence[int]) -> Timeline:
    """The run of `base` with the lowest peak that the executor reaches under any limit.

    A limit far below what can be met makes the executor run in circles, and what comes of that is no
    sign of how low it gets. So the limit is halved, as a ratio, between what is met and what is not.
    """
    best = simulate(program, base, costs)
    missed, met = least_nbytes(program) - 1, best.peak
    while met > max(_CLOSE * missed, missed + 1):
        limit = max(math.isqrt(missed * met), missed + 1)
        found = simulate(program, Execution(program, costs, base, limit=limit).order, costs)
        best = min(best, found, key=lambda timeline: (timeline.peak, timeline.seconds))
        met = min(met, found.peak)
        if found.peak > limit:
            missed = limit
    return best
