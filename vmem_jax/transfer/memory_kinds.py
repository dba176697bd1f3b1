"""XLA's own copies: `jax.device_put` to `jax.memory.Space.Host` and back. No extension needed.

XLA:GPU compiles it to a pair, `copy-start` and `copy-done`, on a stream beside the compute stream,
with host memory from a pool of pinned memory for the whole process. No fence follows the start: the
latency-hiding scheduler (Hopper and data-centre Blackwell) moves it as far from the done as the
fences around both allow. Where that scheduler is off, XLA puts a copy next to its wait and nothing
overlaps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from vmem_jax.transfer import host_memory
from vmem_jax.transfer.host_memory import Limit
from vmem_jax.transfer.layout import Layout
from vmem_jax.transfer.transport import WHOLE, AbstractTransport

_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # XLA's variable, in GiB; 64 without it


class MemoryKinds(AbstractTransport):
    """Transfers of `layout` through XLA's memory spaces; XLA splits them over devices as any
    value."""

    name: ClassVar[str] = "memory_kinds"
    fenced_behind: ClassVar[bool] = False

    def __init__(self, layout: Layout, *, host_budget: int | None = None) -> None:
        """For the transfers of `layout`; `host_budget`, in bytes, bounds all devices together."""
        self._layout, self._host_budget = layout, host_budget

    def start(self, x: jax.Array, *, slot: int, spec: PartitionSpec = WHOLE) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host)

    def gone(
        self, x: jax.Array, held: jax.Array, *, slot: int, spec: PartitionSpec = WHOLE
    ) -> jax.Array:
        return held

    def fetch(
        self, held: jax.Array, like: jax.ShapeDtypeStruct, *, slot: int, spec: PartitionSpec = WHOLE
    ) -> jax.Array:
        return jax.device_put(held, jax.memory.Space.Device)

    def back(self, held: jax.Array, *, slot: int, spec: PartitionSpec = WHOLE) -> jax.Array:
        return held

    def prepare(self, compiled: Any, devices: Sequence[jax.Device]) -> None:
        """Checks that host memory has room for the parked tensors; XLA pins it when the step runs.

        The size is the larger of the plan's and the compiler's.
        """
        stats = compiled.memory_analysis()
        nbytes = max(self._layout.nbytes, stats.host_temp_size_in_bytes) * len(devices)
        pool = int(os.environ.get(_POOL, "64")) << 30
        host_memory.check(
            nbytes,
            lock_pages=False,
            host_budget=self._host_budget,
            others=[Limit(pool, f"XLA's own pool of pinned memory ({_POOL})")],
        )


def unusable(platform: str) -> str:
    """Why XLA's own copies are of no use on `platform`; "" if they are of use."""
    if platform == "cpu":
        return (
            "XLA:CPU leaves what is put into host memory where it is, so nothing is freed "
            "(`transport='memory_kinds'` runs such plans there all the same)"
        )
    return ""
