"""pooled: a max-pool with what makes its input, and its gradient, as JAX primitives.

XLA makes the pool and its index (`capture.overlap`) in two kernels, each of which computes the pool's
input again for every window that an element lies in; they, and that of the gradient, read one element
at a time, since the padding of each is tested. Here one kernel, in Pallas for Triton, makes both, and
another the gradient: a tile is rows of channels, of whose vectors one test of the padding holds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jexc

from vmem_jax import jax_compat as compat
from vmem_jax.capture import overlap
from vmem_jax.conv.elementwise import Elementwise
from vmem_jax.conv.triton import register, tiles_of

pooled_p = jexc.Primitive("pooled_windows")
pooled_p.multiple_results = True
spread_p = jexc.Primitive("spread_windows")

_COLUMNS = 128
_ELEMENTS = 512
"""Of a tile: 8 to each thread, a vector of 16 bytes. The fastest of twelve sizes and warps for
ResNet-50 on an H200 (`benchmarks/pools.py`)."""
_WARPS = 2
_POOLING, _SPREADING = 0.35, 0.75
"""The shares of the memory's rate on an H200: 0.31 to 0.39, and 0.43 for small images to 0.82."""
_MOST = 2**31
"""Elements of an array whose places are computed in 32 bits."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A program's tile: so many rows of so many channels, powers of two that divide those of the
    array that is written, by so many warps."""

    rows: int
    columns: int
    warps: int


def tiling_of(rows: int, channels: int, pixels: int) -> Tiling | None:
    """That of so many rows; None where no tile divides them, or where there are too many pixels.

    Args:
      pixels: rows of what is pooled.
    """
    columns = math.gcd(channels, _COLUMNS)
    height = math.gcd(rows, _ELEMENTS // columns)
    if columns < 16 or height * columns < _ELEMENTS // 4 or pixels * channels >= _MOST:
        return None
    return Tiling(height, columns, _WARPS)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows over height and width of images (n, height, width, channels).

    Attributes:
      height, width: of an image.
      size, strides: along both.
      padding: before and behind the image, along both.
    """

    height: int
    width: int
    size: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]

    @property
    def low(self) -> tuple[int, int]:
        """The padding before the image, along both."""
        (first, _), (second, _) = self.padding
        return first, second

    @property
    def pooled(self) -> tuple[int, int]:
        """Height and width of the pooled image."""
        sizes = zip((self.height, self.width), self.size, self.strides, self.padding, strict=True)
        high, wide = ((n + sum(padding) - k) // s + 1 for n, k, s, padding in sizes)
        return high, wide

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of as many pixels as a stride has, along both."""
        return -(-self.height // self.strides[0]), -(-self.width // self.strides[1])

    def around(self, axis: int) -> list[list[tuple[int, int]]]:
        """For each pixel of group g, along one axis: the windows that it lies in, in order. Window
        g + shift has it as its element of that place: pairs (shift, place)."""
        size, stride, low = self.size[axis], self.strides[axis], self.low[axis]
        backs = range(-(-size // stride) - 1, -1, -1)
        pixels = (divmod(pixel + low, stride) for pixel in range(stride))
        each = ([(shift - b, place + b * stride) for b in backs] for shift, place in pixels)
        return [[pair for pair in pairs if pair[1] < size] for pairs in each]

    @property
    def whole(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Dimensions, strides and padding as `lax` has them for images."""
        return (1, *self.size, 1), (1, *self.strides, 1), ((0, 0), *self.padding, (0, 0))

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Of the elements of a window, row by row."""
        return [(i, j) for i in range(self.size[0]) for j in range(self.size[1])]


def windows_of(eqn: Any, shape: Sequence[int]) -> Windows | None:
    """Those of an equation that pools images of `shape`, channels last; None for other windows."""
    size, strides, padding = map(eqn.params.get, ("window_dimensions", "window_strides", "padding"))
    if len(shape) != 4 or any(size[d] != 1 or strides[d] != 1 or any(padding[d]) for d in (0, 3)):
        return None
    _, height, width, _ = shape
    return Windows(height, width, tuple(size[1:3]), tuple(strides[1:3]), tuple(padding[1:3]))


def pooled_in_tiles(
    make: Callable[..., Sequence[jax.Array]],
    windows: Windows,
    rows: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    tiling: Tiling,
    interpret: bool = False,
) -> list[jax.Array]:
    """The largest element of each window, of zeros the first, and its index (uint8), by one kernel.

    Args:
      make: of tiles of `rows` and (1, columns) of `vectors` makes what is pooled.
      rows: arrays (pixels, channels); `vectors` arrays (channels,).
      interpret: whether it is interpreted, by JAX, on whatever device there is.

    Raises:
      ValueError: `tiling` does not divide what is made.
    """
    from jax.experimental import pallas as pl

    w, (high, wide), c = windows, windows.pooled, tiling.columns
    count, channels = rows[0].shape
    made = count // (w.height * w.width) * high * wide
    tiles = tiles_of(tiling, made, channels, f"{made} rows of {channels} channels")
    one = lambda x: jax.ShapeDtypeStruct((1, channels), x.dtype)
    [value] = jax.eval_shape(make, *map(one, (*rows, *vectors)))
    shapes = [jax.ShapeDtypeStruct((made, channels), d) for d in (value.dtype, np.uint8)]

    def kernel(*refs: Any) -> None:
        *inputs, pooled, index = refs
        here, columns = pl.program_id(0) * tiling.rows, pl.ds(pl.program_id(1) * c, c)
        beside = [ref[columns][None, :] for ref in inputs[len(rows) :]]
        image, y, x = _places(here, tiling.rows, high, wide)

        def element(offset: tuple[int, int]) -> jax.Array:
            i, j = (
                p * s + o - low
                for p, s, o, low in zip((y, x), w.strides, offset, w.low, strict=True)
            )
            inside = (i >= 0) & (i < w.height) & (j >= 0) & (j < w.width)
            at = jnp.where(inside, (image * w.height + i) * w.width + j, 0)
            [made] = make(*(ref[at, columns] for ref in inputs[: len(rows)]), *beside)
            return jnp.where(inside[:, None], made, jnp.full_like(made, -jnp.inf))

        best = element(w.offsets[0])
        found, is_nan = jnp.zeros(best.shape, jnp.int32), best != best
        for k, offset in enumerate(w.offsets[1:], 1):
            new = element(offset)
            keep = best >= new
            found, best = jnp.where(keep, found, k), jnp.where(keep, best, new)
            is_nan |= new != new  # the scan replaces a NaN by what follows it
        pooled[pl.ds(here, tiling.rows), columns] = jnp.where(is_nan, jnp.nan, best)
        index[pl.ds(here, tiling.rows), columns] = found.astype(jnp.uint8)

    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(tiles, channels // c),
        interpret=interpret,
        **({} if interpret else compat.triton_params(tiling.warps, 1)),
    )(*rows, *vectors)


def spread_in_tiles(
    windows: Windows,
    grad: jax.Array,
    index: jax.Array,
    tiling: Tiling,
    interpret: bool = False,
) -> jax.Array:
    """The gradient of what was pooled, (pixels, channels), by one kernel; sums as `overlap.scatter`.

    A row of a tile is a group of as many pixels as the strides have: the gradient and the index of
    the windows that they lie in are read once.

    Args:
      grad, index: (rows, channels), of the pooled value.
      interpret: as `pooled_in_tiles` has it.

    Raises:
      ValueError: `tiling` does not divide the groups.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    w, (high, wide), (down, across) = windows, windows.pooled, windows.groups
    c, (count, channels) = tiling.columns, grad.shape
    images = count // (high * wide)
    groups = images * down * across
    tiles = tiles_of(tiling, groups, channels, f"{groups} groups of {channels} channels")
    along = [w.around(0), w.around(1)]
    whole = down * w.strides[0] == w.height and across * w.strides[1] == w.width

    def kernel(grad: Any, index: Any, out: Any) -> None:
        columns = pl.ds(pl.program_id(1) * c, c)
        image, y, x = _places(pl.program_id(0) * tiling.rows, tiling.rows, down, across)
        read = {}
        for over, right in itertools.product(*(_shifts(each) for each in along)):
            i, j = y + over, x + right
            inside = (i >= 0) & (i < high) & (j >= 0) & (j < wide)
            at = jnp.where(inside, (image * high + i) * wide + j, 0)
            found = jnp.where(inside[:, None], index[at, columns], np.uint8(overlap.NONE))
            read[over, right] = found, grad[at, columns]
        for a, b in itertools.product(*map(range, w.strides)):
            total = jnp.zeros((tiling.rows, c), out.dtype)
            for (over, m), (right, n) in itertools.product(along[0][a], along[1][b]):
                found, value = read[over, right]
                chosen = found == np.uint8(m * w.size[1] + n)
                total += jnp.where(chosen, value, jnp.zeros_like(value))
            i, j = y * w.strides[0] + a, x * w.strides[1] + b
            if whole:
                out[(image * w.height + i) * w.width + j, columns] = total
            else:
                inside = (i < w.height) & (j < w.width)
                at = jnp.where(inside, (image * w.height + i) * w.width + j, 0)
                mask = jnp.broadcast_to(inside[:, None], total.shape)
                triton.store(out.at[at, columns], total, mask=mask)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((images * w.height * w.width, channels), grad.dtype),
        grid=(tiles, channels // c),
        interpret=interpret,
        **({} if interpret else compat.triton_params(tiling.warps, 1)),
    )(grad, index)


def _shifts(around: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Those of all pixels of a group, as `Windows.around` has them."""
    return sorted({shift for each in around for shift, _ in each})


def _places(first: Any, count: int, height: int, width: int) -> tuple[Any, Any, Any]:
    """The image, and the place in it, of each of `count` rows from `first` on."""
    rows = first + jnp.arange(count, dtype=jnp.int32)
    return rows // (height * width), rows // width % height, rows % width


@dataclasses.dataclass(frozen=True)
class Pooled:
    """What the primitive `pooled_windows` computes. Its operands are rows, then vectors, as
    `elementwise` has them.

    Attributes:
      elementwise: makes what is pooled.
      windows: those of the pool.
    """

    elementwise: Elementwise
    windows: Windows

    @property
    def read(self) -> tuple[int, int]:
        """Pixels and channels of what is pooled."""
        *rows, channels = self.elementwise.made[0].aval.shape
        return math.prod(rows), channels

    @property
    def made(self) -> tuple[int, ...]:
        """The shape of the pooled value."""
        shape = self.elementwise.made[0].aval.shape
        return (shape[0], *self.windows.pooled, shape[-1])

    @property
    def tiling(self) -> Tiling | None:
        """That of its kernel; None where XLA's passes do it."""
        rows, channels = self.read
        return tiling_of(math.prod(self.made[:-1]), channels, rows)

    @property
    def efficiency(self) -> float:
        """The share of the memory's rate that its kernel reaches; 1 for XLA's passes."""
        return 1.0 if self.tiling is None else _POOLING

    @property
    def spread(self) -> Spread:
        """Its gradient."""
        return Spread(self.windows, self.elementwise.made[0].aval.shape)


@dataclasses.dataclass(frozen=True)
class Spread:
    """What the primitive `spread_windows` computes. Its operands are the gradient to the pooled value
    and its index.

    Attributes:
      windows: those of the pool.
      shape: of what was pooled.
    """

    windows: Windows
    shape: tuple[int, ...]

    @property
    def tiling(self) -> Tiling | None:
        """That of its kernel; None where XLA's passes do it."""
        groups = self.shape[0] * math.prod(self.windows.groups)
        return tiling_of(groups, self.shape[-1], math.prod(self.shape[:-1]))

    @property
    def efficiency(self) -> float:
        """The share of the memory's rate that its kernel reaches; 1 for XLA's passes."""
        return 1.0 if self.tiling is None else _SPREADING


@pooled_p.def_abstract_eval
def _pooled_abstract(*operands: Any, pooled: Pooled) -> list[Any]:
    del operands
    dtype = pooled.elementwise.made[0].aval.dtype
    return [jax.core.ShapedArray(pooled.made, d) for d in (dtype, np.uint8)]


@spread_p.def_abstract_eval
def _spread_abstract(grad: Any, index: Any, *, spread: Spread) -> Any:
    del index
    return jax.core.ShapedArray(spread.shape, grad.dtype)


def _flat(
    pooled: Pooled, operands: Sequence[jax.Array]
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """Rows (pixels, channels) and vectors (channels,) of the operands."""
    count = len(pooled.elementwise.rows)
    rows = [x.reshape(pooled.read) for x in operands[:count]]
    return rows, [x.reshape(-1) for x in operands[count:]]


def _pooled_by_passes(*operands: jax.Array, pooled: Pooled) -> list[jax.Array]:
    rows, vectors = _flat(pooled, operands)
    [made] = pooled.elementwise(*rows, *(v[None, :] for v in vectors))
    made = made.reshape(pooled.spread.shape)
    size, strides, padding = pooled.windows.whole
    largest = lax.reduce_window(made, -jnp.inf, lax.max, size, strides, padding)
    return [largest, overlap.window_index(size, strides, padding, made)]


def _spread_by_passes(grad: jax.Array, index: jax.Array, *, spread: Spread) -> list[jax.Array]:
    return [overlap.scatter(*spread.windows.whole, spread.shape, grad, index)]


def _pooled_on_cuda(*operands: jax.Array, pooled: Pooled) -> list[jax.Array]:
    tiling = pooled.tiling
    if tiling is None:
        return _pooled_by_passes(*operands, pooled=pooled)
    rows, vectors = _flat(pooled, operands)
    made = pooled_in_tiles(pooled.elementwise, pooled.windows, rows, vectors, tiling)
    return [x.reshape(pooled.made) for x in made]


def _spread_on_cuda(grad: jax.Array, index: jax.Array, *, spread: Spread) -> list[jax.Array]:
    tiling = spread.tiling
    if tiling is None:
        return _spread_by_passes(grad, index, spread=spread)
    grad, index = (x.reshape(-1, spread.shape[-1]) for x in (grad, index))
    return [spread_in_tiles(spread.windows, grad, index, tiling).reshape(spread.shape)]


register(pooled_p, _pooled_by_passes, _pooled_on_cuda)
register(spread_p, _spread_by_passes, _spread_on_cuda)
