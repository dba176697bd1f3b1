"""observation: one real execution of a training step, in the terms of the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vmem_jax.core.lanes import Copy


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that ran from `begin` to `end` seconds, by the profiler's name."""

    name: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Observation:
    """One execution. Times are seconds since its first kernel, as a Timeline's since its first step.

    Attributes:
      seconds: the seconds until the results were ready.
      copies: (transfer, direction) -> the copy; the direction is "out" or "into".
      waits: likewise, the time in which the compute lane waited for the copy. A wait for a copy that
        has ended takes some microseconds too.
      kernels: in chronological order; empty if the profiler saw none.
    """

    seconds: float
    copies: Mapping[tuple[int, str], Copy]
    waits: Mapping[tuple[int, str], Copy]
    kernels: tuple[Kernel, ...]
