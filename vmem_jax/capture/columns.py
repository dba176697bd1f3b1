"""columns: what sums over rows take.

XLA:GPU (0.11.2) sums over rows in blocks of 1,024 threads, each block all rows of 32 columns; of more
than 4,096 rows it makes parts first, which a second kernel sums. Two blocks fit a multiprocessor, so
132 of these run 264 blocks at once, and where fewer are left each still takes its time. An H200 sums
16,384 rows and more of bfloat16 at 3.3 TB/s (`benchmarks/rates.py`), but in a U-Net's step 16 times
4,096 rows of 640 columns, which are 320 blocks, at 2.1, and 4,096 rows of 1,280, 40 blocks, at 0.6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import JaxprEqn

_COLUMNS, _MOST_ROWS = 32, 4096
"""Of a block."""

_AT_ONCE = 264
"""Blocks that run at once on an H100 or an H200."""

OPERATIONS = 30
"""Operations that take as long as such a block reads or writes an element, with all others beside
it: 3.3 TB/s of bfloat16."""


def operations(eqns: Iterable[JaxprEqn], elements: int) -> int:
    """What the sums over rows among the equations of a kernel take, as operations. Sums over other
    axes run in other blocks, behind these.

    Args:
      elements: of all arrays that the kernel reads and writes.
    """
    longer = {(*eqn.params["axes"],): _longer(eqn) for eqn in eqns if is_reduction(eqn)}
    return int(OPERATIONS * elements * sum(longer.values()))


def is_reduction(eqn: JaxprEqn) -> bool:
    """Whether `eqn` reduces some of its operand's dimensions."""
    return class_of(eqn) is Class.REDUCE and bool(eqn.params.get("axes"))


def _longer(eqn: JaxprEqn) -> float:
    """How many times longer a sum over rows takes than one whose blocks all run at once; 0 where it
    sums none."""
    shape, axes = eqn.invars[0].aval.shape, eqn.params["axes"]
    first = end = min(axes)
    while end < len(shape) and (end in axes or shape[end] == 1):
        end += 1  # other axes are summed behind these, which makes a much smaller array
    rows, columns = math.prod(shape[first:end]), math.prod(shape[end:])
    if rows == 1 or columns == 1 or not math.prod(shape):
        return 0.0
    if rows > _MOST_ROWS:
        return 1.0
    blocks = math.prod(shape[:first]) * -(-columns // _COLUMNS)
    return -(-blocks // _AT_ONCE) * _AT_ONCE / blocks
