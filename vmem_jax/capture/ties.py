"""ties: comparisons of a value with what is computed from it, which must see one version of both.

The gradient of a maximum asks which elements equal it: `x == max(x)`. As traced, one always does. A
plan that keeps the maximum and recomputes `x` may break that: XLA fuses `x` differently the second
time, its last bit differs, nothing equals the maximum, and the gradient is divided by zero. The same
holds for a median, a clamp by bounds that depend on the data, and whatever else compares a value with
a selection of its own elements. Rounding moves any other decision (a sign, the winner of a pool) as
it moves the results; here equality is what the formula rests on.

So all equations from `x` to the comparison are one step: the maximum and the mask are written
together, a plan keeps each of them or recomputes both from one version of `x`. The number of elements
that are equal, by which the gradient is divided, belongs to it, too. `x` itself exists in memory, and
a barrier in front of the step keeps XLA from computing it once for the maximum and once for the mask.

Left alone are comparisons with a heavy kernel between the two operands (a product, a convolution):
nothing is equal there but by chance. Kernels that order or select elements are no such. Left alone is
also the search for the largest of several elements by their order, `where(a >= b, a, b)` again and
again, as in the index of a max-pool: each comparison is of two elements. Arguments are never
recomputed, and integers and booleans are recomputed to the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from vmem_jax import jax_compat as compat
from vmem_jax.capture.def_use import makers, readers
from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import ClosedJaxpr, Var

# A JaxprEqn: JAX declares its atoms and types too loosely for a type checker.
Equation = Any

_EQUALITIES = frozenset(("eq", "ne"))
_ORDERS = frozenset(("lt", "le", "gt", "ge"))
COMPARISONS = _EQUALITIES | _ORDERS

_ORDERING = frozenset(
    """
approx_top_k cummax cummin reduce_window_max reduce_window_min select_and_gather_add sort top_k
""".split()
)
"""Heavy kernels whose results are elements of their operands."""

_MOVING = frozenset(
    """
broadcast_in_dim convert_element_type dynamic_slice expand_dims gather rev slice squeeze
""".split()
)
"""Beside views: what keeps elements as they are, and moves or repeats them."""


@dataclasses.dataclass(frozen=True)
class Tie:
    """Equations that belong to one step.

    Attributes:
      equations: indices, in order.
      compared: the values that they compare with what they make of them.
    """

    equations: tuple[int, ...]
    compared: tuple[Var, ...]


def ties(flat: ClosedJaxpr) -> tuple[Tie, ...]:
    """The ties of `flat`, which share no equations."""
    return tuple(_Ties(compat.open_jaxpr(flat).eqns).all())


class _Ties:
    def __init__(self, eqns: Sequence[Equation]) -> None:
        self.eqns = eqns
        self.maker = makers(eqns)
        self.readers = readers(eqns)

    def all(self) -> list[Tie]:
        found: list[tuple[set[int], dict[Var, None]]] = []
        for i, eqn in enumerate(self.eqns):
            if eqn.primitive.name not in COMPARISONS:
                continue
            for x in self._compared(eqn):
                together, compared = self._between(x, i), {x: None}
                if not together:
                    continue
                shared = [one for one in found if not together.isdisjoint(one[0])]
                for other in shared:
                    together, compared = together | other[0], {**other[1], **compared}
                together |= set(self._counts(together))
                if self._is_closed(together):
                    found = [one for one in found if one not in shared]
                    found.append((together, compared))
        # of ties that were joined, one may begin with what another makes
        outer = lambda together, xs: tuple(x for x in xs if self.maker[x] not in together)
        return [Tie(tuple(sorted(one)), outer(one, xs)) for one, xs in found]

    def _compared(self, eqn: Equation) -> list[Var]:
        """The operands of a comparison behind what moves their elements: made by some equation."""
        a, b = eqn.invars
        constant = not (isinstance(a, Var) and isinstance(b, Var))
        if a is b or constant or not jnp.issubdtype(a.aval.dtype, jnp.inexact):
            return []
        found = (self._source(a), self._source(b))
        return [v for v in dict.fromkeys(found) if v is not None and v in self.maker]

    def _source(self, atom: Any) -> Var | None:
        while isinstance(atom, Var) and atom in self.maker:
            eqn = self.eqns[self.maker[atom]]
            if not self._is_moved(self.maker[atom]) or not isinstance(eqn.invars[0], Var):
                break
            atom = eqn.invars[0]
        return atom if isinstance(atom, Var) else None

    def _is_moved(self, i: int) -> bool:
        eqn = self.eqns[i]
        return class_of(eqn) is Class.VIEW or eqn.primitive.name in _MOVING

    def _between(self, x: Var, comparison: int) -> set[int]:
        """The equations on all paths from `x` to both operands of `comparison`; none where one of
        the operands does not depend on it."""
        first, above, todo = self.maker[x], set[int](), [comparison]
        while todo:
            i = todo.pop()
            above.add(i)
            for a in self.eqns[i].invars:
                j = self.maker.get(a, -1) if isinstance(a, Var) else -1
                if j >= first and j not in above and (j == first or self._may_join(j)):
                    todo.append(j)
        depends = {x}
        together = set()
        for i in sorted(above - {first}):
            if any(isinstance(a, Var) and a in depends for a in self.eqns[i].invars):
                depends.update(self.eqns[i].outvars)
                together.add(i)
        operands = self.eqns[comparison].invars
        by_order = self.eqns[comparison].primitive.name in _ORDERS
        passes = lambda i: self._is_moved(i) or (by_order and self._selects(i))
        if all(passes(i) for i in together - {comparison}):
            return set()  # of one value against another of its elements
        return together if all(isinstance(a, Var) and a in depends for a in operands) else set()

    def _selects(self, i: int) -> bool:
        """Whether equation `i` decides by order which of two elements is passed on."""
        return self.eqns[i].primitive.name in _ORDERS or self.eqns[i].primitive.name == "select_n"

    def _may_join(self, i: int) -> bool:
        eqn = self.eqns[i]
        return class_of(eqn) is not Class.HEAVY or eqn.primitive.name in _ORDERING

    def _counts(self, together: Iterable[int]) -> Iterable[int]:
        """The sums of the masks that `together` makes, and what casts these."""
        for i in together:
            if self.eqns[i].primitive.name not in COMPARISONS:
                continue
            for j in self.readers.get(self.eqns[i].outvars[0], []):
                cast = self.eqns[j]
                if cast.primitive.name != "convert_element_type":
                    continue
                sums = [
                    k
                    for k in self.readers.get(cast.outvars[0], [])
                    if self.eqns[k].primitive.name == "reduce_sum"
                ]
                yield from (j, *sums) if sums else ()

    def _is_closed(self, together: set[int]) -> bool:
        """Whether nothing outside of `together` stands between two equations of it."""
        behind: set[Var] = set()  # made outside from what is made inside
        inside: set[Var] = set()
        for i in range(min(together), max(together) + 1):
            eqn = self.eqns[i]
            late = any(isinstance(a, Var) and a in behind for a in eqn.invars)
            if i in together:
                if late:
                    return False
                inside.update(eqn.outvars)
            elif late or any(isinstance(a, Var) and a in inside for a in eqn.invars):
                behind.update(eqn.outvars)
        return True
