"""few_rows: reductions that XLA:GPU computes in the kernel that reads them.

A reduction is a kernel of its own where several threads share its sums. Over few rows one thread
sums all that its element needs (the choice is that of `IsUnnestedReductionFasterThanElemental` in
XLA's reduction_utils.cc), and such a reduction is elementwise: it is fused into what reads it, as a
bias's gradient from 22 samples into the addition of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import JaxprEqn

_WARP = 32
"""Threads of a warp."""


def is_elementwise(eqn: JaxprEqn, readers: Iterable[JaxprEqn]) -> bool:
    """Whether `eqn` is a reduction of leading dimensions over few rows.

    Args:
      readers: of its result and of its views. Where one has more elements, as a broadcast has,
        XLA would compute each sum again for each of them, and does not fuse it.
    """
    axes = eqn.params.get("axes")
    if class_of(eqn) is not Class.REDUCE or not axes or len(eqn.outvars) != 1:
        return False
    shape = eqn.invars[0].aval.shape
    rows = math.prod(shape[axis] for axis in axes)
    # (kept, summed, kept): what is summed stands together, and something that is kept is behind it
    together = max(axes) - min(axes) + 1 == len(axes)
    columns = math.prod(shape[max(axes) + 1 :])
    if not together or columns == 1 or not _is_few(rows, columns):
        return False
    widest = max((v.aval.size for reader in readers for v in reader.outvars), default=0)
    return 0 < widest <= eqn.outvars[0].aval.size


def _is_few(rows: int, columns: int) -> bool:
    """Whether XLA lets one thread sum `rows` values of each of so many columns. One is no sum: it is
    left to what it was, which changes the shape alone."""
    fewer = ((1, math.inf), (2, _WARP), (4, 8), (8, 3))
    return rows > 1 and any(rows < warps * _WARP and columns < most for warps, most in fewer)
