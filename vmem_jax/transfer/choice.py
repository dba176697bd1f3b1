"""Which of the two ways to move bytes a step takes."""

from __future__ import annotations

from vmem_jax.transfer import ffi, memory_kinds
from vmem_jax.transfer.layout import Layout
from vmem_jax.transfer.transport import AbstractTransport

TRANSPORTS = ("auto", "ffi", "memory_kinds")
"""What `jit(transport=...)` may be."""


def choose(wanted: str, platform: str, device_count: int, inlined: bool) -> tuple[str, str]:
    """(name of the transport, "") for a step, or ("", why it cannot move anything).

    "auto" is the extension where it was built for the device, else XLA's own copies where they
    free memory.

    Args:
      wanted: one of `TRANSPORTS`.
      platform: "cpu" or "gpu".
      device_count: of the step.
      inlined: it is called inside another jit.
    """
    if wanted == "memory_kinds":  # where they free nothing, too, when asked for by name
        return wanted, ""
    why = ffi.unusable(platform, device_count, inlined)
    if not why:
        return "ffi", ""
    if wanted == "ffi":
        return "", why
    nor = memory_kinds.unusable(platform)
    return ("", f"{why}; and {nor}") if nor else ("memory_kinds", "")


def open_transport(name: str, layout: Layout, host_budget: int | None) -> AbstractTransport:
    """The transport "ffi" or "memory_kinds" for one executable, with host memory of `layout`."""
    kinds: dict[str, type[ffi.Ffi] | type[memory_kinds.MemoryKinds]] = {
        "ffi": ffi.Ffi,
        "memory_kinds": memory_kinds.MemoryKinds,
    }
    return kinds[name](layout, host_budget=host_budget)
