"""Executables kept in memory, so that what a program compiles twice is compiled once.

Plain jit, a plan that is saved and loaded, and a lowest peak that is asked for are compiled again and
again. JAX's own persistent cache would do, but writes each executable to a file and reads it back,
which takes longer than to compile a small one.
"""

from __future__ import annotations

from typing import Any

from vmem_jax import jax_compat as compat

_kept: dict[str, tuple[Any, int]] = {}


def keep_in_memory() -> None:
    """From now on JAX's persistent cache, where it is enabled, is a table of this process."""
    compat.keep_executables(_get, _put)


def forget() -> None:
    """Drops all executables that are kept."""
    _kept.clear()


def _get(key: str, *others: Any, **more: Any) -> tuple[Any, int | None]:
    return _kept.get(key, (None, None))


def _put(
    key: str, name: str, executable: Any, backend: Any, seconds: int, *others: Any, **more: Any
) -> None:
    _kept[key] = executable, seconds
