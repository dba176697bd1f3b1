"""Max-pool's backward for windows that overlap or are padded: the rule `max_pool_overlap`.

XLA:GPU lowers `select_and_scatter_add` to a scatter into a tensor of zeros that it makes at the start
of the step and holds throughout, and adds with atomics in any order. From a one-byte index of the
pooled shape the same sum is a gather: for each offset in the window, the gradients of the windows
that selected it, spread by the stride. It is one elementwise kernel, in a fixed order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

Padding = Sequence[tuple[int, int]]


def window_index(
    window: Sequence[int], strides: Sequence[int], padding: Padding, y: jax.Array
) -> jax.Array:
    """Row-major index of the element that each window selects, as uint8 of the pooled shape.

    The scan is that of `select_and_scatter_add`: the current element stays if it is >= the next one.
    Padding takes part as -inf, as in JAX's lowering, and may be selected after a NaN; the gradient
    of such a window falls on no element.

    Args:
      window, strides, padding: of the pool, one entry a dimension.
      y: the pool's input, floats.
    """
    shape = [
        (n + lo + hi - w) // s + 1
        for n, w, s, (lo, hi) in zip(y.shape, window, strides, padding, strict=True)
    ]
    padded = lax.pad(y, lax.full((), -np.inf, y.dtype), [(lo, hi, 0) for lo, hi in padding])

    def element(offset: Sequence[int]) -> jax.Array:
        stop = [o + (n - 1) * s + 1 for o, n, s in zip(offset, shape, strides, strict=True)]
        return lax.slice(padded, offset, stop, strides)

    first, *rest = itertools.product(*map(range, window))
    best, index = element(first), lax.full(shape, 0, np.uint8)
    for k, offset in enumerate(rest, 1):
        new = element(offset)
        keep = lax.ge(best, new)
        best = lax.select(keep, best, new)
        index = lax.select(keep, index, lax.full(shape, k, np.uint8))
    return index


def scatter(
    window: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    shape: Sequence[int],
    grad: jax.Array,
    index: jax.Array,
) -> jax.Array:
    """The gradient of the pool's input: each element sums the windows that selected it.

    For one element, windows in row-major order are offsets in descending order: that is the order of
    the sum, as in a sequential scatter.

    Args:
      shape: shape of the pool's input.
      grad: cotangent of the pool's output.
      index: result of `window_index`.
    """
    zero = lax.full((), 0, grad.dtype)
    total = lax.full(shape, 0, grad.dtype)
    for k, offset in reversed(list(enumerate(itertools.product(*map(range, window))))):
        chosen = lax.eq(index, lax.full(index.shape, k, np.uint8))
        part = lax.select(chosen, grad, lax.full(grad.shape, 0, grad.dtype))
        config = []
        for o, n, m, s, (lo, _) in zip(offset, shape, grad.shape, strides, padding, strict=True):
            start = o - lo  # where the first window puts this offset
            config.append((start, n - (start + (m - 1) * s + 1), s - 1))
        total = lax.add(total, lax.pad(part, zero, config))
    return total
