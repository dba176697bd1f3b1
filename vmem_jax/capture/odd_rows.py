"""odd_rows: what reductions of rows of an odd number of elements take.

XLA:GPU (0.11.2) reduces a row by the threads of a warp. Where rows are even each thread reads several
elements at once; odd ones are read element by element, and each takes some time of its own. On an
H200 the maxima of 2**26 elements of bfloat16 take 36 us in rows of 64, 118 in rows of 49, and 48 in
rows of 197 (`benchmarks/rates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from vmem_jax.capture.columns import OPERATIONS, is_reduction
from vmem_jax.capture.shards import Shards
from vmem_jax.jax_compat import JaxprEqn

_A_ROW = 2_250
"""Operations that take as long as a row does beside its bytes, 0.045 ns. Several reductions of one
row take little longer than one."""


def operations(eqns: Iterable[JaxprEqn], elements: int, shards: Shards) -> int:
    """What a kernel takes which reduces odd rows, as operations; 0 if it reduces none.

    Args:
      eqns: of the kernel.
      elements: of all arrays that it reads and writes on one device.
      shards: how values are split over devices.
    """
    rows = max((_rows(eqn) // shards.count(eqn.invars[0]) for eqn in eqns if eqn.invars), default=0)
    return of_rows(rows, 1, elements) if rows else 0


def of_rows(rows: int, length: int, elements: int) -> int:
    """What a kernel takes which reduces `rows` of `length`, as operations; 0 if these are even."""
    return _A_ROW * rows + OPERATIONS * elements if length % 2 else 0


def _rows(eqn: JaxprEqn) -> int:
    """How many odd rows `eqn` reduces."""
    if not is_reduction(eqn):
        return 0
    axes, shape = eqn.params["axes"], eqn.invars[0].aval.shape
    length = math.prod(shape[axis] for axis in axes)
    is_odd = max(axes) == len(shape) - 1 and length > 1 and length % 2 == 1
    return math.prod(shape) // length if is_odd else 0
