"""merged: which operands and results of matrix products XLA:GPU copies to merge their dimensions.

A product without batch dimensions is one of two matrices: XLA merges the dimensions that are summed,
and those that are not, each in the order in which the product names them. Where they do not lie in
memory in that order it copies the operand. A loop stacks along the slowest dimension, as in [time,
batch, width]; a recurrent layer (Flax's `nn.RNN`) returns [batch, time, width], a view of the stack.
What is computed of that elementwise, such as a cast, lies as the stack does, and each product that
reads either copies it for itself. What a product makes for such a loop, [batch, time, width] again,
is copied behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.primitives import ELEMENTWISE, shape_of
from vmem_jax.jax_compat import Atom, JaxprEqn, Var

Order = tuple[int, ...]
"""The dimensions of a value of more than one element, from the slowest to the fastest."""


@dataclasses.dataclass(frozen=True)
class Copied:
    """What is copied for the products of a jaxpr.

    Attributes:
      operands: of each product, by its first result, the operands that do not lie as it reads them.
      results: the results of products that are copied behind them, and whether something is computed
        of them before the loop that wants them reads it.
    """

    operands: Mapping[Var, tuple[Var, ...]]
    results: Mapping[Var, bool]


def copied(eqns: Sequence[JaxprEqn]) -> Copied:
    """What is copied for the products of `eqns`, those of a flat jaxpr."""
    orders = _orders(eqns)
    products = [e for e in eqns if e.primitive.name == "dot_general" and not any(_batch(e))]
    operands = {}
    for eqn in products:
        contract, _ = eqn.params["dimension_numbers"]
        found = tuple(
            a
            for a, summed in zip(eqn.invars, contract, strict=True)
            if isinstance(a, Var) and a in orders and not _is_matrix(a, orders[a], summed)
        )
        if found:
            operands[eqn.outvars[0]] = found
    wanted = _wanted(eqns)
    made = (eqn.outvars[0] for eqn in products)
    return Copied(operands, {v: wanted[v][1] for v in made if v in wanted})


def _batch(eqn: JaxprEqn) -> Any:
    return eqn.params["dimension_numbers"][1]


def _row_major(a: Atom) -> Order:
    return tuple(d for d, n in enumerate(shape_of(a)) if n > 1)


def _is_matrix(a: Var, order: Order, summed: Sequence[int]) -> bool:
    """Whether `a`, whose dimensions lie in `order`, is a matrix of the dimensions that are summed, in
    their order, and of the others."""
    rows = [d for d in _row_major(a) if d not in summed]
    columns = [d for d in summed if shape_of(a)[d] > 1]
    return order in ((*rows, *columns), (*columns, *rows))


def _orders(eqns: Sequence[JaxprEqn]) -> dict[Var, Order]:
    """The values that do not lie row by row, since they are made of what a loop stacks, or
    carries, as one in segments carries its stacks."""
    found: dict[Var, Order] = {}
    stacks: set[Atom] = set()
    for eqn in eqns:
        name = eqn.primitive.name
        if name == "scan":
            stacks.update(eqn.outvars)
            continue
        given = [a for a in eqn.invars if isinstance(a, Var) and (a in stacks or a in found)]
        if not given:
            continue
        order = found.get(given[0], _row_major(given[0]))
        [out] = eqn.outvars[:1]
        if name == "transpose":
            order = _turned(eqn, order)
        elif not _keeps_order(eqn) or shape_of(out) != shape_of(given[0]):
            continue  # what other equations make lies row by row
        stacks.add(out)
        if order != _row_major(out):
            found[out] = order
    return found


def _wanted(eqns: Sequence[JaxprEqn]) -> dict[Var, tuple[Order, bool]]:
    """The values that loops read slice by slice, and not row by row: the order in which they want
    them, and whether something is computed in between."""
    sliced: dict[Atom, tuple[Order, bool]] = {}
    for eqn in reversed(eqns):
        name = eqn.primitive.name
        if name == "scan":
            consts, carry = compat.scan_counts(eqn)
            for a in eqn.invars[consts + carry :]:
                sliced.setdefault(a, (_row_major(a), False))
            continue
        if not eqn.outvars or eqn.outvars[0] not in sliced:
            continue
        order, computes = sliced[eqn.outvars[0]]
        if name == "transpose":
            permutation = eqn.params["permutation"]
            order = tuple(permutation[d] for d in order)
            sliced.setdefault(eqn.invars[0], (order, computes))
        elif _keeps_order(eqn):
            alike = (a for a in eqn.invars if shape_of(a) == shape_of(eqn.outvars[0]))
            sliced.update((a, (order, True)) for a in alike if a not in sliced)
    return {
        a: found for a, found in sliced.items() if isinstance(a, Var) and found[0] != _row_major(a)
    }


def _keeps_order(eqn: JaxprEqn) -> bool:
    """Whether XLA lays out the result of `eqn` as its operands."""
    return eqn.primitive.name in ELEMENTWISE - {"layout_constraint"}


def _turned(eqn: JaxprEqn, order: Order) -> Order:
    """How the dimensions lie of what the transpose `eqn` makes of a value that lies in `order`."""
    permutation = [*eqn.params["permutation"]]
    return tuple(permutation.index(d) for d in order)
