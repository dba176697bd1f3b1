"""A compiled step, the transport that it moves buffers by, and the store of what it compresses: they
live and die together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from vmem_jax.transfer.arena import Arena
from vmem_jax.transfer.compression import Store
from vmem_jax.transfer.transport import AbstractTransport


class Moving:
    """A compiled step that moves or compresses buffers; called like it. Sees to its host memory
    before it runs.

    Attributes:
      compiled: the step as JAX compiled it.
      transport: prepared for `devices` before the first run; its memory is freed with this object.
        None where nothing moves.
      store: likewise, of what is compressed; None where nothing is.
      devices: that the step runs on; none for a card that is not there.
    """

    def __init__(
        self,
        compiled: Any,
        transport: AbstractTransport | None,
        store: Store | None,
        devices: Sequence[jax.Device],
    ) -> None:
        self.compiled, self.transport, self.store = compiled, transport, store
        self.devices = tuple(devices)
        self._prepared = False

    @property
    def arena(self) -> Arena | None:
        """The transport's own host memory, if it has such."""
        return None if self.transport is None else self.transport.arena

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._prepared:
            if self.transport is not None:
                self.transport.prepare(self.compiled, self.devices)  # raises HostMemoryError
            if self.store is not None:
                for device in self.devices:
                    self.store.open(device)
            self._prepared = True
        return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)
