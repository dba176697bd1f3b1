"""Max-pool's backward from a one-byte index: the arithmetic of the rule `max_pool_index`.

Both functions repeat `select_and_scatter_add` bit for bit for windows that tile the input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

# The index is unrolled over the window: an 8x8 window is 64 slices, still one kernel.
MAX_WINDOW = 64

# The index of a window whose gradient the mask removes.
_MASKED = 255


def window_index(window: Sequence[int], y: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Row-major index of the element that each window selects, as uint8.

    The selection is that of `select_and_scatter_add`: the current element stays if it is >= the
    next one, so NaN yields to whatever follows it.

    Args:
        window: dimensions and strides of the windows, at most `MAX_WINDOW` elements.
        y: the pool's input.
        mask: bools of y's shape; where it is off at the selected element, the index names no element.
    """
    shape = [n // w for n, w in zip(y.shape, window, strict=True)]

    def element(x: jax.Array, offset: Sequence[int]) -> jax.Array:
        stop = [o + (n - 1) * w + 1 for o, n, w in zip(offset, shape, window, strict=True)]
        return lax.slice(x, offset, stop, window)

    first, *rest = itertools.product(*map(range, window))
    best, index = element(y, first), lax.full(shape, 0, np.uint8)
    alive = None if mask is None else element(mask, first)
    for k, offset in enumerate(rest, 1):
        new = element(y, offset)
        keep = lax.ge(best, new)
        best = lax.select(keep, best, new)
        index = lax.select(keep, index, lax.full(shape, k, np.uint8))
        if alive is not None and mask is not None:
            alive = lax.select(keep, alive, element(mask, offset))
    if alive is not None:
        index = lax.select(alive, index, lax.full(shape, _MASKED, np.uint8))
    return index


def unpool(
    window: Sequence[int], shape: Sequence[int], grad: jax.Array, index: jax.Array
) -> jax.Array:
    """The gradient at the indexed element of each window, +0 elsewhere.

    A broadcast over the window and a reshape, which XLA:GPU writes in one loop fusion whose threads
    follow the output's layout.

    Args:
        window: dimensions and strides of the windows.
        shape: shape of the pool's input. Elements beyond the last whole window become +0.
        grad: cotangent of the pool's output.
        index: result of `window_index`.
    """
    # Where windows do not divide the input, small pads here and a slice at the end: XLA fuses those
    # with the select, but makes a kernel of its own of a pad at the end.
    cover = [-(-n // w) for n, w in zip(shape, window, strict=True)]
    if cover != list(grad.shape):
        rest = [(0, n - m, 0) for n, m in zip(cover, grad.shape, strict=True)]
        grad = lax.pad(grad, lax.full((), 0, grad.dtype), rest)
        index = lax.pad(index, lax.full((), _MASKED, np.uint8), rest)
    split: list[int] = []  # every dimension, each windowed one followed by its window
    outer: list[int] = []
    inner: list[int] = []
    for n, w in zip(cover, window, strict=True):
        outer.append(len(split))
        split.append(n)
        if w > 1:
            inner.append(len(split))
            split.append(w)
    # The scatter adds to +0, so -0 becomes +0. By comparison, because XLA simplifies x + 0 to x.
    grad = lax.select(lax.eq(grad, lax.full_like(grad, 0)), lax.full_like(grad, 0), grad)
    offset = lax.reshape(lax.iota(np.uint8, math.prod(window)), [split[d] for d in inner])
    chosen = lax.eq(
        lax.broadcast_in_dim(index, split, outer), lax.broadcast_in_dim(offset, split, inner)
    )
    spread = lax.broadcast_in_dim(grad, split, outer)
    tiled = lax.select(chosen, spread, lax.full(split, 0, grad.dtype))
    whole = lax.reshape(tiled, [n * w for n, w in zip(cover, window, strict=True)])
    return whole if whole.shape == tuple(shape) else lax.slice(whole, [0] * whole.ndim, shape)
