"""Registered: an object of the native extension for one executable, by id."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

import jax

Where = tuple[str, int]
"""A device as the extension knows it: the platform, and the ordinal within this process."""


class Registered:
    """An object that is freed by `close`, at the end of a `with` block, or with this object. Programs
    that still call it then get an error.

    Attributes:
      id: its name in the calls; never reused in a process.
    """

    def __init__(self, id: int, free: Callable[[int], None]) -> None:
        """Args: `free`, the extension's, takes the id."""
        self.id = id
        self._ready: set[Where] = set()  # the devices that it takes something on
        self._free = weakref.finalize(self, _free, free, id, self._ready)
        # At the end of the process the memory goes anyway, and waiting for runs could hang.
        setattr(self._free, "atexit", False)  # noqa: B010  its stub has no such slot

    def close(self) -> None:
        """Waits for runs in flight and frees its memory on all devices. A second call does
        nothing."""
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def wait_for_runs() -> None:
    """Until what was dispatched has ended: the calls are effects, and what has one is waited for."""
    with contextlib.suppress(Exception):  # a failed run raises from its own results
        jax.effects_barrier()


def _free(free: Callable[[int], None], id: int, ready: set[Where]) -> None:
    """Frees it once no run that was dispatched can call for it any more."""
    if ready:
        wait_for_runs()
    free(id)
