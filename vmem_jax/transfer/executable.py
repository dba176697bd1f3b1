"""A compiled step and the transport that it moves buffers by: they live and die together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from vmem_jax.transfer.arena import Arena
from vmem_jax.transfer.transport import AbstractTransport


class Moving:
    """A compiled step that moves buffers; called like it. Sees to its host memory before it runs.

    Attributes:
      compiled: the step as JAX compiled it.
      transport: prepared for `devices` once the step has run; its memory is freed with this object.
      devices: that the step runs on; none for a card that is not there.
    """

    def __init__(
        self, compiled: Any, transport: AbstractTransport, devices: Sequence[jax.Device]
    ) -> None:
        self.compiled, self.transport, self.devices = compiled, transport, tuple(devices)
        self._prepared = False

    @property
    def arena(self) -> Arena | None:
        """The transport's own host memory, if it has such."""
        return self.transport.arena

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._prepared:
            self.transport.prepare(self.compiled, self.devices)  # raises HostMemoryError
            self._prepared = True
        return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)
