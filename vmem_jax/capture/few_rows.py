"""few_rows: reductions that XLA:GPU computes in the kernel that reads them.

A reduction is a kernel of its own where several threads share its sums. Over few rows one thread
sums all that its element needs (the choice is that of `IsUnnestedReductionFasterThanElemental` in
XLA's reduction_utils.cc), and such a reduction is elementwise: it is fused into what reads it, as a
bias's gradient from 22 samples into the addition of it.

The compiler unrolls the loop of such a thread over 8 rows and fewer (JAX 0.11.2). Over more it waits
for each row before it reads the next: in a T5's step the gradient to the biases of attention, which
sums what it makes of 16 samples, takes 286 µs of an H200, and that of 8 samples 39. So a rewritten
step on one GPU makes such sums in pieces of 8 rows at most (`rewrite.column_sums`): of 9 to 31
samples they take about half as long (`benchmarks/few_rows.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax.numpy as jnp

from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import JaxprEqn

_WARP = 32
"""Threads of a warp."""

_UNROLLED = 8
"""Rows that one thread reads at once."""

_LEAST = 2**20
"""Elements of the smallest array that is summed in pieces; less of them take a few microseconds."""


def is_elementwise(eqn: JaxprEqn, readers: Iterable[JaxprEqn]) -> bool:
    """Whether `eqn` is a reduction of leading dimensions over few rows.

    Args:
      readers: of its result and of its views. Where one has more elements, as a broadcast has,
        XLA would compute each sum again for each of them, and does not fuse it.
    """
    if not _few_of(eqn):
        return False
    widest = max((v.aval.size for reader in readers for v in reader.outvars), default=0)
    return 0 < widest <= eqn.outvars[0].aval.size


def pieces_of(eqn: JaxprEqn) -> int:
    """The number of pieces in which `eqn` adds up its rows; 1 where they are no more than one thread
    reads at once, or few elements, or are added up by several threads."""
    if eqn.primitive.name != "reduce_sum" or eqn.invars[0].aval.size < _LEAST:
        return 1
    is_number = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
    return max(1, -(-_few_of(eqn) // _UNROLLED)) if is_number else 1


def _few_of(eqn: JaxprEqn) -> int:
    """The rows that a reduction reduces, where one thread reduces all that its element needs; 0 where
    several do."""
    axes = eqn.params.get("axes")
    if class_of(eqn) is not Class.REDUCE or not axes or len(eqn.outvars) != 1:
        return 0
    shape = eqn.invars[0].aval.shape
    rows = math.prod(shape[axis] for axis in axes)
    # (kept, summed, kept): what is summed stands together, and something that is kept is behind it
    together = max(axes) - min(axes) + 1 == len(axes)
    columns = math.prod(shape[max(axes) + 1 :])
    return rows if together and columns > 1 and _is_few(rows, columns) else 0


def _is_few(rows: int, columns: int) -> bool:
    """Whether XLA lets one thread sum `rows` values of each of so many columns. One is no sum: it is
    left to what it was, which changes the shape alone."""
    fewer = ((1, math.inf), (2, _WARP), (4, 8), (8, 3))
    return rows > 1 and any(rows < warps * _WARP and columns < most for warps, most in fewer)
