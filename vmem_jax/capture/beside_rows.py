"""beside_rows: what values are to a kernel that has rows in its tiles."""

from __future__ import annotations

import enum
import math
from typing import Any

from vmem_jax.capture.primitives import shape_of
from vmem_jax.jax_compat import JaxprEqn

REDUCTIONS = ("reduce_max", "reduce_sum")
"""What rows are reduced by, in such a kernel."""

FLOATING = ("bfloat16", "float16", "float32")
"""Types that it reduces, and divides by numbers: in float32."""


class Kind(enum.Enum):
    """What a value is beside rows: an element for each of theirs, one a row, a number, or anything
    else."""

    ROWS = 0
    EACH = 1
    NUMBER = 2
    OTHER = 3


def kind_of(a: Any, size: tuple[int, int]) -> Kind:
    """The kind of a value beside so many rows of so many elements."""
    shape = shape_of(a)
    count, (rows, length) = math.prod(shape), size
    if count == rows * length and shape[-1] == length:
        return Kind.ROWS
    if count == 1:
        return Kind.NUMBER
    return Kind.EACH if count == rows else Kind.OTHER


def keeps(eqn: JaxprEqn) -> bool:
    """Whether `eqn` changes the shape alone of a value of one of the kinds, or spreads it."""
    name = eqn.primitive.name
    is_one = name in REDUCTIONS and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    return is_one or name in _KEPT


def spreads(eqn: JaxprEqn, a: Any, size: tuple[int, int]) -> bool:
    """Whether `eqn` makes rows, and reads neither all elements of `a` in order nor one for each."""
    kind, [out] = kind_of(a, size), eqn.outvars
    if kind is not Kind.EACH or kind_of(out, size) is not Kind.ROWS:
        return kind is Kind.OTHER and kind_of(out, size) is Kind.ROWS
    every = [d for d, n in enumerate(shape_of(out)[:-1]) if n > 1]
    dims = zip(dimensions(eqn, a), shape_of(a), strict=True)
    return [d for d, n in dims if n > 1] != every


def dimensions(eqn: JaxprEqn, a: Any) -> list[int]:
    """For each dimension of `a` that of what `eqn` makes of it."""
    if eqn.primitive.name == "broadcast_in_dim":
        return [*map(int, eqn.params["broadcast_dimensions"])]
    return [*range(len(shape_of(a)))]


_KEPT = frozenset(
    """
broadcast_in_dim copy expand_dims layout_constraint name reshape squeeze stop_gradient transpose
""".split()
)
