"""Max-pool's backward for windows that overlap or are padded: the rule `max_pool_overlap`.

XLA:GPU lowers `select_and_scatter_add` to a scatter into a tensor of zeros that it makes at the start
of the step and holds throughout, and adds with atomics in any order. From a one-byte index of the
pooled shape the same sum is a gather: of the windows that an element lies in, the gradients of those
that selected it. It is one elementwise kernel, in a fixed order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jexc
from jax.interpreters import mlir

from vmem_jax.jax_compat import JaxprEqn

Padding = Sequence[tuple[int, int]]

index_p = jexc.Primitive("window_index")
"""`window_index` of a pool's input. Its parameters have the names of those of `reduce_window_max`."""

gradient_p = jexc.Primitive("window_gradient")
"""`scatter` of the gradient and the index, with the parameters of `index_p`, and `shape`."""

NONE = 255
"""An index that no window has."""


def is_made_apart(eqn: JaxprEqn) -> bool:
    """Whether the result of `eqn` is an index that elements read of several windows each."""
    params = eqn.params
    return eqn.primitive is index_p and any(
        w > s for w, s in zip(params["window_dimensions"], params["window_strides"], strict=True)
    )


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
    shape = _pooled(window, strides, padding, y.shape)
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

    In a dimension with windows of w elements and strides of s an element lies in at most ⌈w / s⌉
    windows. The kernel reads the gradient and the index of these alone, where the element's place
    divided by the stride says, and compares the index with the element's place in the window. It adds
    them in row-major order of windows, as a sequential scatter does.

    Args:
      shape: shape of the pool's input.
      grad: cotangent of the pool's output.
      index: result of `window_index`.
    """
    total = lax.full(shape, 0, grad.dtype)
    counts = (-(-w // s) for w, s in zip(window, strides, strict=True))
    for back in itertools.product(*(range(n - 1, -1, -1) for n in counts)):
        of_window = functools.partial(_spread, strides, padding, shape, back)
        chosen = lax.eq(of_window(index, NONE), _place(window, strides, padding, shape, back))
        total = lax.add(total, lax.select(chosen, of_window(grad, 0), lax.full_like(total, 0)))
    return total


def _place(
    window: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    shape: Sequence[int],
    back: Sequence[int],
) -> jax.Array:
    """Row-major index, as uint8, of each element in the window that begins `back` windows before the
    last one that begins at or before it; `NONE` where that window ends before the element."""
    place, inside = lax.full(shape, 0, np.int32), lax.full(shape, True, np.bool_)
    for d, (w, s, (low, _)) in enumerate(zip(window, strides, padding, strict=True)):
        if w == 1 == s:
            continue
        along = lax.rem(lax.iota(np.int32, shape[d]) + np.int32(low), np.int32(s))
        along = lax.broadcast_in_dim(along + np.int32(back[d] * s), shape, (d,))
        place = place * np.int32(w) + along
        if (back[d] + 1) * s > w:
            inside = lax.bitwise_and(inside, lax.lt(along, np.int32(w)))
    return lax.select(inside, place, lax.full(shape, NONE, np.int32)).astype(np.uint8)


def _spread(
    strides: Sequence[int],
    padding: Padding,
    shape: Sequence[int],
    back: Sequence[int],
    pooled: jax.Array,
    fill: int,
) -> jax.Array:
    """For each element the entry of `pooled` of that window; `fill` where there is no such window."""
    around: list[tuple[int, int, int]] = []
    split: list[int] = []  # every dimension, each with a stride followed by that
    outer: list[int] = []
    starts: list[int] = []
    for n, m, s, (low, _), b in zip(shape, pooled.shape, strides, padding, back, strict=True):
        first, last = low // s - b, (n - 1 + low) // s - b
        around.append((-first, last - (m - 1), 0))
        outer.append(len(split))
        split += [last - first + 1] if s == 1 else [last - first + 1, s]
        starts.append(low % s)
    entries = lax.pad(pooled, lax.full((), fill, pooled.dtype), around)
    whole = [n * s for n, s in zip(entries.shape, strides, strict=True)]
    spread = lax.reshape(lax.broadcast_in_dim(entries, split, outer), whole)
    ends = [start + n for start, n in zip(starts, shape, strict=True)]
    return lax.slice(spread, starts, ends)


def _pooled(
    window: Sequence[int], strides: Sequence[int], padding: Padding, shape: Sequence[int]
) -> list[int]:
    """The shape of the pooled value."""
    every = zip(shape, window, strides, padding, strict=True)
    return [(n + low + high - w) // s + 1 for n, w, s, (low, high) in every]


@index_p.def_abstract_eval
def _index_abstract(
    y: Any, *, window_dimensions: Any, window_strides: Any, padding: Any
) -> jax.core.ShapedArray:
    shape = _pooled(window_dimensions, window_strides, padding, y.shape)
    return jax.core.ShapedArray(shape, np.uint8)


@gradient_p.def_abstract_eval
def _gradient_abstract(grad: Any, index: Any, *, shape: Any, **_: Any) -> jax.core.ShapedArray:
    del index
    return jax.core.ShapedArray(shape, grad.dtype)


def _index(y: jax.Array, *, window_dimensions: Any, window_strides: Any, padding: Any) -> jax.Array:
    return window_index(window_dimensions, window_strides, padding, y)


def _gradient(
    grad: jax.Array,
    index: jax.Array,
    *,
    window_dimensions: Any,
    window_strides: Any,
    padding: Any,
    shape: Any,
) -> jax.Array:
    return scatter(window_dimensions, window_strides, padding, shape, grad, index)


index_p.def_impl(lambda *given, **params: jax.jit(functools.partial(_index, **params))(*given))
gradient_p.def_impl(
    lambda *given, **params: jax.jit(functools.partial(_gradient, **params))(*given)
)
mlir.register_lowering(index_p, mlir.lower_fun(_index, multiple_results=False))
mlir.register_lowering(gradient_p, mlir.lower_fun(_gradient, multiple_results=False))
