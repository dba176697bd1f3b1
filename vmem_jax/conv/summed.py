"""summed: sums over rows of what is computed element by element, as one pass, a JAX primitive.

A batch norm's backward pass sums the gradient to its result, and that times the normalised value.
Behind a ReLU XLA writes the gradient in the kernel of one of these sums and reads it in another.
Here one kernel, in Pallas for Triton, reads each tile of rows once, computes all of it there, stores
what the step needs as a value and adds the rest up in float32. A program adds tile to tile, element
by element, and sums the rows of the last of these alone; XLA sums what the programs sum.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jexc

from vmem_jax import jax_compat as compat
from vmem_jax.conv.elementwise import Elementwise
from vmem_jax.conv.triton import divided, register

summed_p = jexc.Primitive("summed_rows")
summed_p.multiple_results = True

Made = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
"""What is stored, of shape (rows, channels), and sums of shape (channels,) in float32."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a pass is divided among programs.

    Attributes:
      rows, columns: of a tile, powers of two that divide those of the arrays.
      programs: of each block of columns; each takes tile after tile.
      warps: of a program.
    """

    rows: int
    columns: int
    programs: int
    warps: int


_COLUMNS = 128
_ELEMENTS = 2048
"""Of a tile, 8 to each thread for a vector of 16 bytes of 16-bit values, and 2 of these in flight."""
_WARPS = 4
_PROGRAMS = 528
"""Four to each of 132 multiprocessors of an H100 or an H200. With twice as many, and tiles twice as
large, an H200 takes 1.14 to 1.43 times as long for ResNet-152's layers of 14 × 14 and 28 × 28
(`benchmarks/results/summed_tilings_h200.jsonl`)."""
_EFFICIENCY = 0.9
"""The share of the memory's rate: 0.91 to 0.97 of large arrays in a step of ResNet-50 on an H100,
less of small ones and of those with five sums; 0.86 of all bytes."""


def tiling_of(rows: int, channels: int) -> Tiling | None:
    """That of arrays (rows, channels); None where no tile divides them."""
    columns = math.gcd(channels, _COLUMNS)
    height = math.gcd(rows, _ELEMENTS // columns)
    if columns < 16 or height * columns < _ELEMENTS // 4:
        return None
    most = max(1, _PROGRAMS // (channels // columns))
    tiles = rows // height
    each = -(-tiles // most)  # all have as many, but for the last
    return Tiling(height, columns, -(-tiles // each), _WARPS)


def by_passes(
    make: Callable[..., Sequence[jax.Array]],
    stored: int,
    rows: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
) -> Made:
    """The same as `in_tiles` as XLA runs it."""
    made = make(*rows, *(v[None, :] for v in vectors))
    return tuple(made[:stored]), tuple(x.astype(jnp.float32).sum(0) for x in made[stored:])


def in_tiles(
    make: Callable[..., Sequence[jax.Array]],
    stored: int,
    rows: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    tiling: Tiling,
    interpret: bool = False,
) -> Made:
    """What `make` makes of tiles, by one kernel, and the sum of what its programs sum.

    Args:
      make: of tiles of `rows` and (1, columns) of `vectors` makes `stored` arrays, then arrays that
        are summed over all rows.
      rows: arrays (rows, channels); `vectors` arrays (channels,).
      interpret: whether it is interpreted, by JAX, on whatever device there is.

    Raises:
      ValueError: `tiling` does not divide the arrays.
    """
    from jax.experimental import pallas as pl

    height, width = rows[0].shape
    tiles, programs = divided(tiling, height, width, f"{height} rows of {width} channels")
    one = lambda x: jax.ShapeDtypeStruct((1, width), x.dtype)
    made = jax.eval_shape(make, *map(one, (*rows, *vectors)))
    shapes = [jax.ShapeDtypeStruct((height, width), x.dtype) for x in made[:stored]]
    summed = len(made) - stored
    shapes += [jax.ShapeDtypeStruct((programs, width), jnp.float32)] * summed

    def kernel(*refs: Any) -> None:
        wide, thin = refs[: len(rows)], refs[len(rows) : len(rows) + len(vectors)]
        outputs = refs[len(rows) + len(vectors) :]
        first, block = pl.program_id(0), pl.program_id(1)
        columns = pl.ds(block * tiling.columns, tiling.columns)
        beside = [ref[columns][None, :] for ref in thin]

        def tile(i: Any, sums: Any) -> Any:
            here = pl.ds((first + i * programs) * tiling.rows, tiling.rows)
            values = make(*(ref[here, columns] for ref in wide), *beside)
            for ref, value in zip(outputs[:stored], values[:stored], strict=True):
                ref[here, columns] = value
            added = zip(sums, values[stored:], strict=True)
            return tuple(s + x.astype(jnp.float32) for s, x in added)

        zeros = (jnp.zeros((tiling.rows, tiling.columns), jnp.float32),) * summed
        count = (tiles - first + programs - 1) // programs
        sums = lax.fori_loop(0, count, tile, zeros)
        for ref, value in zip(outputs[stored:], sums, strict=True):
            ref[first, columns] = jnp.sum(value, 0)

    found = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(programs, width // tiling.columns),
        interpret=interpret,
        **({} if interpret else compat.triton_params(tiling.warps, 2)),
    )(*rows, *vectors)
    return tuple(found[:stored]), tuple(_totals(found[stored:]))


def _totals(parts: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The sum of each of `parts` (programs, channels), all by one kernel of XLA's."""
    add = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]
    return lax.reduce([*parts], [jnp.float32(0)] * len(parts), add, (0,))


@dataclasses.dataclass(frozen=True)
class Summed:
    """What the primitive computes. Its operands are rows, then vectors, as `elementwise` has them.

    Attributes:
      elementwise: makes what is stored, then what is summed.
      stored: how many values are stored.
      sums: the types of the sums.
    """

    elementwise: Elementwise
    stored: int
    sums: tuple[Any, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and channels of its arrays."""
        *rows, channels = self.elementwise.made[0].aval.shape
        return math.prod(rows), channels

    @property
    def tiling(self) -> Tiling | None:
        """That of its kernel; None where XLA's passes do it."""
        return tiling_of(*self.size)

    @property
    def efficiency(self) -> float:
        """The share of the memory's rate that its kernel reaches; 1 for XLA's passes."""
        return 1.0 if self.tiling is None else _EFFICIENCY

    @property
    def workspace(self) -> int:
        """Bytes of what the programs of its kernel sum."""
        tiling = self.tiling
        return 0 if tiling is None else 4 * tiling.programs * len(self.sums) * self.size[1]


def summed(given: Summed, *operands: jax.Array) -> list[jax.Array]:
    """Runs `given`; returns what is stored, then the sums, as the equations that it stands for do."""
    return summed_p.bind(*operands, summed=given)


@summed_p.def_abstract_eval
def _abstract(*operands: Any, summed: Summed) -> list[Any]:
    del operands
    made = summed.elementwise.made[: summed.stored]
    return [*(jax.core.ShapedArray(v.aval.shape, v.aval.dtype) for v in made), *summed.sums]


def _run(by: Any, *operands: jax.Array, summed: Summed) -> list[jax.Array]:
    each, count = summed.elementwise, len(summed.elementwise.rows)
    size = summed.size
    rows = [x.reshape(size) for x in operands[:count]]
    stored, sums = by(each, summed.stored, rows, [x.reshape(-1) for x in operands[count:]])
    made = [x.reshape(v.aval.shape) for x, v in zip(stored, each.made, strict=False)]
    return made + [x.astype(a.dtype) for x, a in zip(sums, summed.sums, strict=True)]


def _on_cuda(*operands: jax.Array, summed: Summed) -> list[jax.Array]:
    tiling = summed.tiling
    by: Any = by_passes if tiling is None else functools.partial(in_tiles, tiling=tiling)
    return _run(by, *operands, summed=summed)


_on_cuda_once = jax.jit(_on_cuda, static_argnames="summed")
"""Traced, and lowered in one module, once for equal passes: a network has many."""


register(summed_p, functools.partial(_run, by_passes), _on_cuda_once)
