"""Which of the two transports a step takes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh

from vmem_jax.transfer import ffi, memory_kinds
from vmem_jax.transfer.layout import Layout
from vmem_jax.transfer.transport import AbstractTransport

TRANSPORTS = ("auto", "ffi", "memory_kinds")
"""What `jit(transport=...)` may be."""


def choose(
    wanted: str,
    platform: str,
    devices: Sequence[jax.Device],
    mesh: AbstractMesh | None,
    inlined: bool,
) -> tuple[str, str]:
    """(name of the transport, "") for a step, or ("", why it cannot move anything).

    "auto" is the extension where it was built for the device, else XLA's own copies where they
    free memory.

    Args:
      wanted: one of `TRANSPORTS`.
      platform: "cpu" or "gpu".
      devices: of the step.
      mesh: that its arguments are split over, where there are several devices.
      inlined: it is called inside another jit.
    """
    if wanted == "memory_kinds":  # where they free nothing, too, when asked for by name
        return wanted, ""
    why = ffi.unusable(platform, devices, mesh, inlined)
    if not why:
        return "ffi", ""
    if wanted == "ffi":
        return "", why
    nor = memory_kinds.unusable(platform)
    return ("", f"{why}; and {nor}") if nor else ("memory_kinds", "")


def open_transport(
    name: str, layout: Layout, host_budget: int | None, mesh: AbstractMesh | None = None
) -> AbstractTransport:
    """The transport "ffi" or "memory_kinds" for one executable, with host memory of `layout`."""
    if name == ffi.Ffi.name:
        return ffi.Ffi(layout, mesh=mesh, host_budget=host_budget)
    assert name == memory_kinds.MemoryKinds.name, name
    return memory_kinds.MemoryKinds(layout, host_budget=host_budget)
