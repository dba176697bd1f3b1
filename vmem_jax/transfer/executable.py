"""A compiled step, the transport that it moves buffers by, and the store of what it compresses: they
live and die together."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from vmem_jax.errors import show_nbytes
from vmem_jax.transfer.arena import Arena
from vmem_jax.transfer.compression import Store
from vmem_jax.transfer.transport import AbstractTransport


class Moving:
    """A compiled step that moves or compresses buffers; called like it. Sees to its host memory
    before it runs.

    On a CPU runs take turns, and each begins after the one before it has ended: what that one left in
    the arena or the store is there because it failed, and is dropped. XLA informs the arena of no run
    that failed, and on a CPU any thread may run any part of a run. On a GPU the thread that launches
    a run makes all of its calls, so the arena sees by itself that the run before has ended.

    Attributes:
      compiled: the step as JAX compiled it.
      transport: prepared for `devices` before the first run; its memory is freed with this object.
        None where nothing moves.
      store: likewise, of what is compressed; None where nothing is.
      devices: that the step runs on; none for a card that is not there.
      cache_nbytes: device memory for the tensor cache of the arena, taken when the step is called.
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
        self.cache_nbytes = 0
        self._prepared = False
        self._cached = 0  # bytes of the cache that it has
        self._turn = threading.Lock()
        self._last: tuple[jax.Array, ...] | None = ()  # ready when the last run has ended

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
        if self._cached != self.cache_nbytes and self.arena is not None:
            self._take_cache(self.arena)
        if any(device.platform != "cpu" for device in self.devices):
            return self.compiled(*args, **kwargs)
        with self._turn:
            self._drop_leftovers()
            # A call that raises has ended where it runs on one device
            self._last = () if len(self.devices) == 1 else None
            outs = self.compiled(*args, **kwargs)
            self._last = _smallest(outs, (args, kwargs))
        return outs

    def _take_cache(self, arena: Arena) -> None:
        """Takes the memory of the cache, without which the step runs as well, only slower."""
        try:
            for device in self.devices:
                arena.set_cache_capacity(device, self.cache_nbytes)
        except MemoryError as error:
            for device in self.devices:
                arena.set_cache_capacity(device, 0)
            warnings.warn(
                f"There are no {show_nbytes(self.cache_nbytes)} of device memory for a tensor cache "
                f"({error}), so everything that moves crosses the link. XLA's pool leaves more with "
                "a smaller XLA_CLIENT_MEM_FRACTION.",
                stacklevel=2,
            )
            self.cache_nbytes = 0
        except RuntimeError:  # another thread runs the step: it is taken at a later call
            return
        self._cached = self.cache_nbytes

    def _drop_leftovers(self) -> None:
        """Waits for the last run, and drops what it left behind if it failed."""
        if self._last is None:
            return
        for out in self._last:
            with contextlib.suppress(RuntimeError):  # the caller of that run gets its error
                out.block_until_ready()
            if out.is_deleted():  # so it does not tell; the arena waits for the run
                return
        for device in self.devices:
            if self.arena is not None:
                self.arena.reset(device)
            if self.store is not None:
                self.store.reset(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def _smallest(outs: Any, given: Any) -> tuple[jax.Array, ...] | None:
    """The smallest result of a run, since it is kept until the next one; None where there is none.

    All results of a run are ready when it has ended. An argument that is handed through is no result.
    """
    arguments = {id(leaf) for leaf in jax.tree.leaves(given)}
    made = [out for out in jax.tree.leaves(outs) if id(out) not in arguments]
    return (min(made, key=lambda out: out.size),) if made else None
