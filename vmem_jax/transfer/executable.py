"""A compiled step together with the arena that its calls name: they live and die together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from vmem_jax.transfer import extension
from vmem_jax.transfer.arena import Arena


class WithArena:
    """A compiled step that moves buffers; called like it. Pins its arena before the first run.

    Attributes:
      compiled: the step as JAX compiled it.
      arena: pinned on `devices` once the step has run; freed with this object.
      devices: that the step runs on.
    """

    def __init__(self, compiled: Any, arena: Arena, devices: Sequence[jax.Device]) -> None:
        self.compiled, self.arena, self.devices = compiled, arena, tuple(devices)
        self._pinned = False

    def pin(self) -> None:
        """Pins the arena on every device, unless that has been done. Raises HostMemoryError."""
        for device in self.devices:
            self.arena.pin(device)
        self._pinned = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._pinned:
            self.pin()
        return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def unusable(platform: str, device_count: int) -> str:
    """Why a step on `platform` cannot move buffers, or "" where it can."""
    try:
        platforms = extension.load().targets()
    except ImportError as error:
        return str(error)
    name = "cpu" if platform == "cpu" else "CUDA"
    if name not in platforms:
        return "vmem_jax's native extension was built without CUDA: install it where CUDA is found"
    if device_count > 1:
        return f"it runs on {device_count} devices, and XLA does not split the calls over devices"
    return ""
