"""column_sums: sums over few rows in parts, as XLA:GPU makes those over more than 4,096.

A block of threads sums all rows of 32 columns. Over 3,152 rows of 1,024 columns, as of a bias in a
sub-batch, that is 32 blocks on a card that runs 264 at once (`capture.columns`). In 8 parts it is
256, and what adds up the parts is fused into what reads the sum. A barrier between the two keeps XLA
from making one sum of them. Parts are added up in float32 or wider, as XLA adds up within a block.

Fewer than 32 rows one thread adds up for each column. It reads up to 8 of them at once, so more are
added up in pieces (`capture.few_rows`), which XLA makes in one kernel.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from vmem_jax.capture.columns import parts_of
from vmem_jax.capture.editor import spliced, with_each_replaced
from vmem_jax.capture.few_rows import pieces_of
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn


def with_sums_in_parts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with sums over rows in parts, in the bodies of its loops, too."""
    return with_each_replaced(closed, lambda _: _divided)


def _divided(eqn: JaxprEqn) -> list[JaxprEqn]:
    parts, pieces = parts_of(eqn), pieces_of(eqn)
    if parts == pieces == 1:
        return [eqn]
    some, count = (_parts, parts) if parts > 1 else (_pieces, pieces)
    by = functools.partial(some, count=count)
    add_up = functools.partial(_added_up, axes=(*sorted(eqn.params["axes"]),), by=by)
    return spliced(add_up, eqn.invars, eqn, eqn.outvars[0])[0]


def _added_up(
    x: jax.Array, axes: tuple[int, ...], by: Callable[[jax.Array, int], jax.Array]
) -> jax.Array:
    """The sum of `x` over `axes`, which stand together, `by` what sums rows along one axis."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    rows = wide.reshape(*x.shape[: axes[0]], -1, *x.shape[axes[-1] + 1 :])
    return by(rows, axes[0]).astype(x.dtype)


def _parts(x: jax.Array, axis: int, count: int) -> jax.Array:
    some = x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :]).sum(axis + 1)
    return lax.optimization_barrier(some).sum(axis)


def _pieces(x: jax.Array, axis: int, count: int) -> jax.Array:
    """No barrier, since one kernel has all pieces of few rows."""
    return functools.reduce(operator.add, (a.sum(axis) for a in jnp.array_split(x, count, axis)))
