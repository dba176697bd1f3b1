"""tied_dimensions: which dimensions of what an equation reads and makes are one and the same.

Made longer, all of them are longer: those of a sum's operands and its result, and the rows that a
transpose moves. A reduction or a product ends this: what it reduces, or sums over, is gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vmem_jax.capture.columns import is_reduction
from vmem_jax.capture.primitives import ELEMENTWISE, shape_of
from vmem_jax.jax_compat import JaxprEqn, Literal, Var

Place = tuple[Var, int]
"""A value, and one of its dimensions."""

REDUCTIONS = ("reduce_sum", "reduce_max", "argmax")
"""Those that may reduce a dimension which was made longer."""

_MOVES = ("reshape", "squeeze", "expand_dims")


def tied(eqn: JaxprEqn, v: Var, d: int) -> list[Place] | None:
    """The places that are one with dimension `d` of `v`, which `eqn` reads or makes.

    Returns:
      None where it isn't known, or not so. None are tied by what sums over `d`, and by products: they
      read or make a place of their own.
    """
    if eqn.effects or len(eqn.outvars) != 1:
        return None
    [out] = eqn.outvars
    name = eqn.primitive.name
    if name == "dot_general":
        return _tied_by_product(eqn, v, d)
    if name in ELEMENTWISE:
        return [(a, d) for a in (*eqn.invars, out) if isinstance(a, Var) and _has(a, d, out)]
    if name in ("scatter-add", "scatter_add"):
        return _tied_by_scatter(eqn, d)
    source: Any = eqn.invars[0] if len(eqn.invars) == 1 else None
    if name == "iota" or (name == "broadcast_in_dim" and isinstance(source, Literal)):
        return [(out, d)]
    if not isinstance(source, Var):
        return None
    if name in REDUCTIONS and v is source and d in eqn.params["axes"]:
        return [] if len(eqn.params["axes"]) == 1 else None
    places = _places(eqn)
    if places is None:
        return None
    before = d if v is source else places.index(d) if d in places else None
    if before is None:  # it is repeated along `d`, or divided
        return [(out, d)] if name == "broadcast_in_dim" else None
    after = places[before]
    if after is None:
        return None
    if shape_of(source)[before] != shape_of(out)[after]:  # one element is repeated
        return [(out, after)] if v is out else None
    return [(source, before), (out, after)]


def _has(a: Var, d: int, out: Var) -> bool:
    """Whether operand `a` of an elementwise equation has dimension `d` of the result `out`. What has
    one element there, or is a number, is repeated."""
    shape, whole = shape_of(a), shape_of(out)
    return len(shape) == len(whole) and shape[d] == whole[d]


def _places(eqn: JaxprEqn) -> Sequence[int | None] | None:
    """Of each dimension of its operand that of the result of `eqn`, None of those that are gone; None
    where they are mixed."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    if name == "broadcast_in_dim":
        return eqn.params["broadcast_dimensions"]
    if name == "transpose":
        return [eqn.params["permutation"].index(d) for d in range(len(shape))]
    if is_reduction(eqn):
        left = [d for d in range(len(shape)) if d not in eqn.params["axes"]]
        return [left.index(d) if d in left else None for d in range(len(shape))]
    if name in _MOVES and (name != "reshape" or eqn.params["dimensions"] is None):
        return [_moved(shape, eqn.outvars[0].aval.shape, d) for d in range(len(shape))]
    return None


def _moved(before: Sequence[int], after: Sequence[int], d: int) -> int | None:
    """Where dimension `d` of an array is once that has another shape; None if it is divided, or one
    with others."""
    size, ahead = before[d], math.prod(before[:d])
    if size == 1:
        return None
    at = [e for e, n in enumerate(after) if n == size and math.prod(after[:e]) == ahead]
    return at[0] if at else None


def _tied_by_product(eqn: JaxprEqn, v: Var, d: int) -> list[Place] | None:
    _, batches = eqn.params["dimension_numbers"]
    if any(d in batch for a, batch in zip(eqn.invars, batches, strict=True) if a is v):
        return None
    return None if v is eqn.outvars[0] and d < len(batches[0]) else []


def _tied_by_scatter(eqn: JaxprEqn, d: int) -> list[Place] | None:
    """Those of an array to which numbers are added, each at an index of dimension `d`."""
    numbers = eqn.params["dimension_numbers"]
    source, [out] = eqn.invars[0], eqn.outvars
    if d not in numbers.inserted_window_dims or d not in numbers.scatter_dims_to_operand_dims:
        return None
    return [(a, d) for a in (source, out) if isinstance(a, Var)]


def made_of(product: JaxprEqn) -> list[tuple[int, int]]:
    """Of each dimension of the result of `product` the side of the operand that has it, and the
    dimension there; of those of a batch on the left."""
    (left, right), batches = product.params["dimension_numbers"]
    found = [(0, d) for d in batches[0]]
    for side, gone in ((0, left), (1, right)):
        rank = len(product.invars[side].aval.shape)
        found += [(side, d) for d in range(rank) if d not in (*gone, *batches[side])]
    return found
