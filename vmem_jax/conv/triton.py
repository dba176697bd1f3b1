"""triton: lowers a primitive to a kernel of Pallas for Triton on a GPU, else to passes of XLA's, and
divides among its programs what such a kernel computes."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.interpreters import mlir

from vmem_jax import jax_compat as compat


class Tile(Protocol):
    """So many rows and columns."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...


class Tiled(Tile, Protocol):
    """How rows and columns are divided among programs: tiles of so many of each, and so many programs
    at the most for each block of columns."""

    @property
    def programs(self) -> int: ...


def tiles_of(tile: Tile, rows: int, columns: int, what: str) -> int:
    """The tiles of each block of columns.

    Args:
      what: is divided, for people.

    Raises:
      ValueError: `tile` does not divide it.
    """
    if rows % tile.rows or columns % tile.columns:
        raise ValueError(
            f"tiles of {tile.rows} rows and {tile.columns} columns do not divide {what}."
        )
    return rows // tile.rows


def divided(tiling: Tiled, rows: int, columns: int, what: str) -> tuple[int, int]:
    """(tiles, programs) of each block of columns; the arguments and errors of `tiles_of`."""
    tiles = tiles_of(tiling, rows, columns, what)
    return tiles, min(tiling.programs, tiles)


def register(primitive: Any, passes: Callable[..., Any], kernel: Callable[..., Any]) -> None:
    """Gives `primitive` what runs it.

    Args:
      passes: computes its results of its operands and parameters, by XLA.
      kernel: the same on a GPU, which need not be there.
    """

    def on_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
        here = jax.default_backend() == "gpu"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The Pallas Triton backend")
            with contextlib.nullcontext() if here else compat.on_described_gpu("NVIDIA H200"):
                return mlir.lower_fun(kernel, multiple_results=True)(ctx, *operands, **params)

    primitive.def_impl(
        lambda *operands, **params: jax.jit(functools.partial(primitive.bind, **params))(*operands)
    )
    mlir.register_lowering(primitive, mlir.lower_fun(passes, multiple_results=True))
    mlir.register_lowering(primitive, on_cuda, platform="cuda")
