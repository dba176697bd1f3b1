"""transport: moves a buffer to host memory and back, by the four points of a transfer.

There are two, of one interface: `ffi` (our calls, an arena of our own) and `memory_kinds` (XLA's own
copies). `rewrite` puts the points where the plan has them and does not know which of them it uses.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from vmem_jax.transfer.arena import Arena

WHOLE = PartitionSpec()
"""The split of a value that every device has as a whole, and of everything on one device."""


class AbstractTransport(abc.ABC):
    """The four points of a transfer as functions of traced values.

    The result of a point is *held* until the next point, where it is fenced together with the spine,
    so that no copy ends later than planned. `slot` is the index of the buffer's slot in the layout;
    `spec` is its split over the mesh of the step.

    Attributes:
      name: "ffi" or "memory_kinds".
      fenced_behind: whether a fence over the result of a point makes XLA issue the point there. It
        does if the result is a token, or a buffer that is still being written. If the result is the
        copy itself, the fence would wait for the copy to end.
      arena: the arena of the transport; None if it has none.
    """

    name: ClassVar[str]
    fenced_behind: ClassVar[bool]
    arena: Arena | None = None

    @abc.abstractmethod
    def start(self, x: jax.Array, *, slot: int, spec: PartitionSpec = WHOLE) -> jax.Array:
        """The copy of `x` (any shape and dtype) to the host begins."""

    @abc.abstractmethod
    def gone(
        self, x: jax.Array, held: jax.Array, *, slot: int, spec: PartitionSpec = WHOLE
    ) -> jax.Array:
        """The copy of `x` has ended; its memory is free from here."""

    @abc.abstractmethod
    def fetch(
        self,
        held: jax.Array,
        like: jax.ShapeDtypeStruct,
        *,
        slot: int,
        spec: PartitionSpec = WHOLE,
    ) -> jax.Array:
        """Memory of the shape and dtype of `like` is allocated; the copy back begins."""

    @abc.abstractmethod
    def back(self, held: jax.Array, *, slot: int, spec: PartitionSpec = WHOLE) -> jax.Array:
        """The copy back has ended; returns the buffer."""

    @abc.abstractmethod
    def prepare(self, compiled: Any, devices: Sequence[jax.Device]) -> None:
        """Prepares host memory before the first run of `compiled` on `devices`.

        Raises:
          HostMemoryError: there is too little memory, or it may not be pinned.
        """
