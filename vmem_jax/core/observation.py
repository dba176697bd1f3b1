"""observation: what one execution of a training step really did, in the simulator's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vmem_jax.core.lanes import Copy


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """What the device computed from `begin` to `end`, by the profiler's name."""

    name: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Observation:
    """One execution. Times are seconds since its first kernel, as a Timeline's since its first step.

    Attributes:
      seconds: until the results were there.
      copies: by (transfer, direction), the direction "out" or "into".
      waits: likewise, when the compute lane stood before the end of the copy and when it went on;
        a wait for what was there already takes some microseconds too.
      kernels: in the order of time; none where the profiler saw none.
    """

    seconds: float
    copies: Mapping[tuple[int, str], Copy]
    waits: Mapping[tuple[int, str], Copy]
    kernels: tuple[Kernel, ...]
