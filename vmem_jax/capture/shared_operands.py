"""shared_operands: which matrix products of an iteration XLA:GPU computes as one.

Of two products that have an operand in common XLA makes one of the other operands' concatenation, if
both sum over the same dimensions of what they share, neither is large but for that, and neither
depends on the other. So the gates of a recurrent layer are one product, of which each gate reads a
part, and so are the gradients to the layer's input and state, which are products of one cotangent.
XLA starts with what was computed first, and merges no product a second time.

A part of a product is added to nothing in the product's kernel: what reads it computes that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from vmem_jax.capture.primitives import nbytes
from vmem_jax.jax_compat import MERGED_MIB, JaxprEqn, Var

_MOST = MERGED_MIB * 2**20
"""Bytes of the other operand and of the result of a product that XLA merges, or of several that it
has merged."""


def products_as_one(
    eqns: Sequence[JaxprEqn], boundary: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The products that are computed as one, as groups of indices of equations.

    Args:
      boundary: where these are one iteration of two loops, the first equation of the second one.
    """
    parts = range(boundary or 0), range(boundary or 0, len(eqns))
    return tuple(itertools.chain.from_iterable(_Merging(eqns, part).groups() for part in parts))


class _Merging:
    def __init__(self, eqns: Sequence[JaxprEqn], part: range) -> None:
        self.eqns = eqns
        self.readers: dict[Var, list[int]] = {}
        self.products: dict[Var, list[int]] = {}  # of each operand the products that read it
        self.group: dict[int, tuple[int, ...]] = {}  # of a product those that it is one with
        for i in part:
            eqn = eqns[i]
            operands = dict.fromkeys(a for a in eqn.invars if isinstance(a, Var))
            for v in operands:
                self.readers.setdefault(v, []).append(i)
                if eqn.primitive.name == "dot_general":
                    self.products.setdefault(v, []).append(i)
        made = [v for i in part for v in eqns[i].outvars if v in self.products]
        self.shared = [*made, *(v for v in self.products if v not in {*made})]

    def groups(self) -> Iterator[tuple[int, ...]]:
        for v in self.shared:
            waiting: list[tuple[int, ...]]
            waiting = [(i,) for i in self.products[v] if i not in self.group]
            while waiting:
                one, *waiting = waiting
                for other in [*waiting]:
                    if self._fit(one, other, v):
                        one += other
                        waiting.remove(other)
                        self.group.update(dict.fromkeys(one, one))
                if len(one) > 1:
                    yield one

    def _fit(self, one: tuple[int, ...], other: tuple[int, ...], shared: Var) -> bool:
        alike = _reading(self.eqns[one[0]], shared) == _reading(self.eqns[other[0]], shared)
        small = max(self._nbytes(one, shared), self._nbytes(other, shared)) <= _MOST
        return alike and small and not self._depend(one, other) and not self._depend(other, one)

    def _nbytes(self, products: Iterable[int], shared: Var) -> int:
        eqns = [self.eqns[i] for i in products]
        values = dict.fromkeys(a for eqn in eqns for a in (*eqn.invars, *eqn.outvars))
        return sum(nbytes(a.aval) for a in values if a is not shared)

    def _depend(self, late: tuple[int, ...], early: tuple[int, ...]) -> bool:
        """Whether one of `late` depends on one of `early`, or on what is computed with it."""
        found, waiting = {*early}, [*early]
        while waiting:
            made = self.eqns[waiting.pop()].outvars
            readers = {i for v in made for i in self.readers.get(v, ())}
            new = {j for i in readers for j in self.group.get(i, (i,))} - found
            found |= new
            waiting += new
        return not found.isdisjoint(late)


def _reading(product: JaxprEqn, shared: Var) -> tuple[object, ...]:
    """How `product` reads `shared`, and what must be alike in products that are merged besides."""
    side = 0 if product.invars[0] is shared else 1
    summed, batch = (dims[side] for dims in product.params["dimension_numbers"])
    types = *(a.aval.dtype for a in product.invars), product.outvars[0].aval.dtype
    return tuple(summed), tuple(batch), types, product.params["precision"]
