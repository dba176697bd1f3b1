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

    What a point returns is *held* until the next one, and is fenced together with the spine in front
    of that, so that no copy ends later than its plan says. `slot` is the index of the buffer's slot
    in the layout, `spec` how it is split over the mesh of the step.

    Attributes:
      name: "ffi" or "memory_kinds".
      fenced_behind: whether a fence over what a point returns makes XLA issue it there. It does
        where that is a token, or a buffer that is still being written. Where it is the copy itself
        the fence would wait for the copy to end.
      arena: our own host memory, if it has such.
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
        """`x` is out, and its memory is free from here."""

    @abc.abstractmethod
    def fetch(
        self,
        held: jax.Array,
        like: jax.ShapeDtypeStruct,
        *,
        slot: int,
        spec: PartitionSpec = WHOLE,
    ) -> jax.Array:
        """The memory, of the shape and dtype of `like`, is taken again; the copy back begins."""

    @abc.abstractmethod
    def back(self, held: jax.Array, *, slot: int, spec: PartitionSpec = WHOLE) -> jax.Array:
        """The buffer is there again; returns it."""

    @abc.abstractmethod
    def prepare(self, compiled: Any, devices: Sequence[jax.Device]) -> None:
        """Before the first run of `compiled` on `devices`: its host memory.

        Raises:
          HostMemoryError: there is not so much, or it may not be pinned.
        """
