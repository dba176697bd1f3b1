"""racing: how often an algorithm is run until its time is known as well as anybody needs it.

There are thousands of algorithms, and a fastest configuration needs few of them: what is slower than
another of no more workspace, the *incumbent*, is out. One run shows that, but not a first one, which
loads kernels, and not where a launch takes as long as the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_COUNT = 10
"""Runs, of which the median counts."""

_ENOUGH = 0.006
"""Seconds of all runs together: of long ones a few are as good as ten."""

_LONG = 0.025
"""Seconds of a first run that is the only one: what it loads is little beside it."""

_LOADING = 0.005
"""Seconds that loading kernels may take."""

_RELOADING = 0.001
"""The same of an algorithm that has run with another number of samples: most kernels are the same."""

_LAUNCH = 5e-5
"""Seconds that the host may be behind the device in a run by itself."""

_FAR_BEHIND = 3.0
"""As many times as long as the incumbent: a first run is enough, whatever it loads."""

_BEHIND = 1.2
"""The same for a run that loads next to nothing. Runs of one kernel differ by less."""

Run = Callable[[int], Sequence[float]]
"""Runs an algorithm so many times, one right after the other; the seconds of each."""


def race(run: Run, incumbent: float = math.inf, loaded: bool = False) -> tuple[float, ...]:
    """The seconds of those runs of an algorithm that count.

    Args:
      incumbent: seconds of the fastest algorithm known that needs no more workspace.
      loaded: whether it has run before in this process, with another number of samples.
    """
    behind = _BEHIND * incumbent + _RELOADING if loaded else _FAR_BEHIND * incumbent + _LOADING
    [first] = run(1)
    if first >= (_ENOUGH if loaded else _LONG) or first > behind:
        return (first,)
    [second] = run(1)
    more = min(_COUNT - 1, int((_ENOUGH - second) / second))
    if second > _BEHIND * incumbent + _LAUNCH or more <= 0:
        return (second,)
    return (second, *run(more))
