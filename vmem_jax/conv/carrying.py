"""carrying: what does convolutions that normalise their operand or add up their result, and how long.

Measured times decide where the database has them; else those of `core/slowdown.py` do, and what runs
is what cuDNN names first of the engines whose results are right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable

import jax

from vmem_jax.conv import cudnn
from vmem_jax.conv.profiler import micro_of
from vmem_jax.conv.timings import Known, known, profile_on
from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro
from vmem_jax.core.machine import Machine
from vmem_jax.core.slowdown import bare, slowdown
from vmem_jax.policy.workspace_reuse import BatchSizes

_MOST_CHECKS = 4
"""Plans that are held against the convolution, of those that were not timed."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a convolution runs.

    Attributes:
      configuration: one call; without seconds, so that equal calls are equal.
      more: seconds that it takes longer than the bare convolution.
    """

    configuration: Configuration
    more: float


def by_xla(convolution: Convolution) -> Way:
    """XLA's passes, where they run anyway."""
    return Way(_once(Micro(convolution.batch, XLA, (), 0, 0.0)), 0.0)


def ways(
    convolutions: Iterable[Convolution],
    target: str | jax.Device,
    machine: Machine,
    profile: bool | None,
) -> dict[Convolution, Way]:
    """Those of `convolutions` that cuDNN has an engine for, on a GPU or on the name of one.

    Args:
      profile: whether to time on that GPU what is not known; None takes what is known, False nothing.
    """
    wanted = dict.fromkeys(convolutions)
    times: Known = lambda convolution: []
    if not isinstance(target, str) and profile is not False:
        with contextlib.suppress(ImportError):
            if profile:
                every = [*wanted, *map(bare, wanted)]
                profile_on(target, every, BatchSizes.UNDIVIDED)
            times = known(target)
    found = {c: _way(c, target, machine, times) for c in wanted}
    return {c: way for c, way in found.items() if way is not None}


def _way(c: Convolution, target: str | jax.Device, machine: Machine, times: Known) -> Way | None:
    whole = lambda c: [m for m in times(c) if m.batch == c.batch]
    timed = min(whole(c), key=lambda m: m.seconds, default=None)
    alone = min((m.seconds for m in whole(bare(c))), default=None)
    if timed is None:
        micro = _named(c, target)
        seconds = machine.convolution_seconds(bare(c)) if alone is None else alone
        return None if micro is None else Way(_once(micro), (slowdown(c) - 1) * seconds)
    seconds = timed.seconds / slowdown(c) if alone is None else alone
    return Way(_once(timed), timed.seconds - seconds)


@functools.lru_cache(maxsize=4096)
def _named(c: Convolution, target: str | jax.Device) -> Micro | None:
    """What cuDNN names first, if it has an engine; on a GPU that is here of those that are right."""
    try:
        plans = cudnn.plans(c, target)
    except (ImportError, ValueError, RuntimeError):
        return None
    for plan in itertools.islice(plans, _MOST_CHECKS):
        if not isinstance(target, str):
            try:
                cudnn.check(c, plan, target)
            except (RuntimeError, ValueError):
                continue
        return micro_of(c.batch, plan)
    return None


def _once(micro: Micro) -> Configuration:
    return Configuration((dataclasses.replace(micro, seconds=0.0),))
