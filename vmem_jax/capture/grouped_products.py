"""grouped_products: products of which several dimensions are rows are batches of matrices, on a GPU.

Queries that share keys in groups, as Llama has them, make scores [samples, key heads, tokens, queries
of the group, keys]. `jnp.einsum` and `jax.nn.dot_product_attention` transpose these to what they
reduce and weigh, and their gradients back: as the scores are much larger than queries and keys, most
of what such an attention moves is that. XLA (0.11.2) fuses these transposes with what is computed of
the scores, and then no longer reduces the rows of a softmax in the kernel that reads them.

So the order of the dimensions of what a product makes is that in which it is reduced, and what is
computed of it lies in that order, too. It is the small operand which is transposed, and its rows are
one dimension; products that sum over queries of a group and tokens sum over one dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.columns import is_reduction
from vmem_jax.capture.def_use import readers
from vmem_jax.capture.editor import spliced
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.primitives import ELEMENTWISE, nbytes, shape_of
from vmem_jax.capture.shards import is_typed
from vmem_jax.capture.transposes import moves_elements
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var

Order = tuple[int, ...]
"""Which dimension of a value is each dimension of the array that stands for it."""

_SAME_SHAPE = ELEMENTWISE - {"layout_constraint"}

_MOST_VISITS = 64
"""Equations that are followed from a product to what reduces its result, at most."""

_DEEPEST = 8
"""Equations between a value that is made in another order and the numbers that it is made of, at
most: a causal mask is six deep."""


def with_grouped_products(flat: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """`flat` whose products of several dimensions of rows, or sums over several, are batches of
    matrices; `flat` where that would transpose as much as now.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
    """
    if platform != "gpu":
        return flat
    if not any(_is_grouped(eqn) and _makes_most(eqn) for eqn in compat.open_jaxpr(flat).eqns):
        return flat
    other = _Walk(flat).run()
    return other if _moved_nbytes(other) < _moved_nbytes(flat) else flat


@dataclasses.dataclass(frozen=True)
class _Side:
    """The dimensions of one operand of a product, in the order in which they lie.

    Attributes:
      batch: in the order of the product.
      rows: those that the result has, too.
      summed: in the order of the product.
    """

    batch: Order
    rows: Order
    summed: Order

    @property
    def is_matrix(self) -> bool:
        return len(self.rows) == 1 and len(self.summed) == 1

    def is_grouped(self, shape: Sequence[int]) -> bool:
        """Whether several dimensions are rows, or summed; one of a single element is none."""
        return any(sum(shape[d] > 1 for d in dims) > 1 for dims in (self.rows, self.summed))


def _sides(eqn: JaxprEqn) -> tuple[_Side, _Side]:
    contracted, batches = eqn.params["dimension_numbers"]

    def side(n: int) -> _Side:
        own = {*contracted[n], *batches[n]}
        rows = tuple(d for d in range(len(shape_of(eqn.invars[n]))) if d not in own)
        return _Side(tuple(batches[n]), rows, tuple(contracted[n]))

    return side(0), side(1)


def _is_grouped(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a batch of products, in one of which several dimensions are rows or summed."""
    if eqn.primitive.name != "dot_general" or any(map(is_typed, (*eqn.invars, *eqn.outvars))):
        return False
    sides = left, right = _sides(eqn)
    if not all((left.batch, left.rows, right.rows, left.summed)):
        return False
    return any(s.is_grouped(shape_of(a)) for s, a in zip(sides, eqn.invars, strict=True))


def _makes_most(eqn: JaxprEqn) -> bool:
    """Whether what `eqn` makes is larger than what it reads."""
    return all(_size(a) < _size(eqn.outvars[0]) for a in eqn.invars)


def _size(a: Atom) -> int:
    return math.prod(shape_of(a))


def _moved_nbytes(flat: ClosedJaxpr) -> int:
    """Bytes of what is transposed, for products also without an equation that says so."""
    moved = 0
    for eqn in compat.open_jaxpr(flat).eqns:
        if eqn.primitive.name == "transpose" and moves_elements(eqn):
            moved += nbytes(eqn.outvars[0].aval)
        elif _is_grouped(eqn):
            for a, side in zip(eqn.invars, _sides(eqn), strict=True):
                moved += nbytes(a.aval) * (not _lies_as_matrices(side))
    return moved


def _lies_as_matrices(side: _Side) -> bool:
    """Whether a product reads such an operand as it lies: batches, rows and what is summed each lie
    together, in the order that the product has."""
    order = (side.batch, side.rows, side.summed), (side.batch, side.summed, side.rows)
    return any((flat := sum(each, ())) == tuple(sorted(flat)) for each in order)


@dataclasses.dataclass(frozen=True)
class _Lies:
    """How a value lies.

    Attributes:
      stored: the array that stands for it: the value with its dimensions in `order`.
    """

    stored: Var
    order: Order


class _Walk:
    """Carries the transposes of what products make on to what reads it."""

    def __init__(self, flat: ClosedJaxpr) -> None:
        self.flat, self.opened = flat, compat.open_jaxpr(flat)
        self.old: Sequence[JaxprEqn] = self.opened.eqns
        self.readers = readers(self.old)
        self.maker = {v: eqn for eqn in self.old for v in eqn.outvars}
        self.eqns: list[JaxprEqn] = []
        self.lies: dict[Var, _Lies] = {}
        self.turned: dict[tuple[Var, Order], Var] = {}  # (value, order) -> what stands for it
        self.matrices: dict[tuple[Var, Order, tuple[int, ...]], Var] = {}

    def run(self) -> ClosedJaxpr:
        for eqn in self.old:
            if not self._carried(eqn):
                invars = [self._as_it_was(a, eqn) for a in eqn.invars]
                self.eqns.append(eqn.replace(invars=invars))
        last = self.old[-1]
        outvars = [self._as_it_was(a, last) for a in self.opened.outvars]
        consts = compat.constants(self.flat)
        parts = self.opened.constvars, consts, self.opened.invars, outvars, self.eqns
        return drop_dead(compat.close(*parts, like=self.flat))

    def _carried(self, eqn: JaxprEqn) -> bool:
        """Whether `eqn` has been written for how its operands lie."""
        if _is_grouped(eqn):
            return self._product(eqn)
        name = eqn.primitive.name
        if name == "transpose" and (self._reads_turned(eqn) or self._is_for_grouped(eqn)):
            return self._transposed(eqn)
        if not self._reads_turned(eqn) or eqn.effects or len(eqn.outvars) != 1:
            return False
        if name == "broadcast_in_dim" and len(eqn.invars) == 1:
            return self._broadcast(eqn)
        if is_reduction(eqn):
            return self._reduced(eqn)
        return name in _SAME_SHAPE and self._elementwise(eqn)

    def _reads_turned(self, eqn: JaxprEqn) -> bool:
        return any(isinstance(a, Var) and a in self.lies for a in eqn.invars)

    def _is_for_grouped(self, eqn: JaxprEqn) -> bool:
        """Whether such products are all that reads the result of `eqn`."""
        read_by = [self.old[i] for i in self.readers.get(eqn.outvars[0], ())]
        return bool(read_by) and all(map(_is_grouped, read_by)) and not is_typed(eqn.outvars[0])

    def _at(self, a: Atom) -> _Lies:
        assert isinstance(a, Var), "a number does not lie in an order"
        return self.lies.get(a) or _Lies(a, tuple(range(len(shape_of(a)))))

    def _set(self, v: Var, stored: Var, order: Sequence[int]) -> None:
        self.lies[v] = _Lies(stored, tuple(order))

    def _splice(self, fn: Any, args: Sequence[Atom], like: JaxprEqn) -> Var:
        made, out = spliced(fn, args, like)
        self.eqns += made
        return out

    def _as_it_was(self, a: Atom, like: JaxprEqn) -> Atom:
        """`a` with its dimensions in the order that it has in the step."""
        if not isinstance(a, Var) or a not in self.lies:
            return a
        return self._in_order(a, tuple(range(len(shape_of(a)))), like)

    def _in_order(self, a: Atom, order: Order, like: JaxprEqn) -> Atom:
        """What stands for `a` with its dimensions in `order`, made anew where that is free."""
        if not isinstance(a, Var) or (a not in self.lies and not shape_of(a)):
            return a
        lies = self._at(a)
        if lies.order == order:
            return lies.stored
        if (a, order) not in self.turned:
            self.turned[a, order] = self._made_in_order(a, order, like)
        return self.turned[a, order]

    def _made_in_order(self, a: Var, order: Order, like: JaxprEqn) -> Var:
        made = self.maker.get(a)
        if made is not None and a not in self.lies and self._is_free(a):
            if made.primitive.name == "broadcast_in_dim":
                return self._broadcast_in(made, order)
            if made.primitive.name == "iota":
                shape = tuple(made.params["shape"][d] for d in order)
                dimension = order.index(made.params["dimension"])
                out = compat.new_var(made.outvars[0].aval.update(shape=shape))
                params = {**made.params, "shape": shape, "dimension": dimension}
                self.eqns.append(made.replace(outvars=[out], params=params))
                return out
            return self._elementwise_in(made, order)
        lies = self._at(a)
        permutation = tuple(lies.order.index(d) for d in order)
        turn = functools.partial(lax.transpose, permutation=permutation)
        return self._splice(turn, [lies.stored], like)

    def _is_free(self, a: Atom, depth: int = _DEEPEST) -> bool:
        """Whether `a` is made of numbers, of what is repeated, or of smaller values."""
        if not isinstance(a, Var) or not shape_of(a):
            return True
        made = self.maker.get(a)
        if made is None or depth == 0 or made.effects or len(made.outvars) != 1:
            return False
        name = made.primitive.name
        if name == "broadcast_in_dim":
            return len(made.invars) == 1 and _size(made.invars[0]) < _size(a)
        others = (b for b in made.invars if _size(b) == _size(a))
        return name == "iota" or (
            name in _SAME_SHAPE and all(self._is_free(b, depth - 1) for b in others)
        )

    def _broadcast_in(self, eqn: JaxprEqn, order: Order) -> Var:
        [out] = eqn.outvars
        shape = tuple(shape_of(out)[d] for d in order)
        places = [order.index(d) for d in eqn.params["broadcast_dimensions"]]
        first = tuple(sorted(range(len(places)), key=places.__getitem__))
        source = self._in_order(eqn.invars[0], first, eqn)
        repeat = functools.partial(
            lax.broadcast_in_dim, shape=shape, broadcast_dimensions=tuple(sorted(places))
        )
        return self._splice(repeat, [source], eqn)

    def _elementwise_in(self, eqn: JaxprEqn, order: Order) -> Var:
        invars = [self._in_order(a, order, eqn) for a in eqn.invars]
        aval: Any = eqn.outvars[0].aval
        out = compat.new_var(aval.update(shape=tuple(aval.shape[d] for d in order)))
        self.eqns.append(eqn.replace(invars=invars, outvars=[out]))
        return out

    def _transposed(self, eqn: JaxprEqn) -> bool:
        lies = self._at(eqn.invars[0])
        permutation = eqn.params["permutation"]  # dimension d of the result was permutation[d]
        order = tuple(permutation.index(d) for d in lies.order)
        self._set(eqn.outvars[0], lies.stored, order)
        return True

    def _broadcast(self, eqn: JaxprEqn) -> bool:
        """What has one element a row is repeated in the order that the row has."""
        lies, places = self._at(eqn.invars[0]), eqn.params["broadcast_dimensions"]
        order = [*range(len(eqn.params["shape"]))]
        for place, d in zip(places, lies.order, strict=True):
            order[place] = places[d]
        self._set(eqn.outvars[0], self._broadcast_in(eqn, tuple(order)), order)
        return True

    def _reduced(self, eqn: JaxprEqn) -> bool:
        lies, axes = self._at(eqn.invars[0]), eqn.params["axes"]
        left = [d for d in range(len(lies.order)) if d not in axes]
        order = [left.index(d) for d in lies.order if d not in axes]
        own = tuple(i for i, d in enumerate(lies.order) if d in axes)
        aval: Any = eqn.outvars[0].aval
        out = compat.new_var(aval.update(shape=tuple(aval.shape[d] for d in order)))
        params = {**eqn.params, "axes": own}
        self.eqns.append(eqn.replace(invars=[lies.stored], outvars=[out], params=params))
        self._set(eqn.outvars[0], out, order)
        return True

    def _elementwise(self, eqn: JaxprEqn) -> bool:
        """Whether it is computed in the order of an operand: not if that turns one as large which is
        in the order of the step."""
        [out] = eqn.outvars
        arrays = [a for a in eqn.invars if isinstance(a, Var) and shape_of(a)]
        whole = [a for a in arrays if shape_of(a) == shape_of(out)]
        order = next((self.lies[a].order for a in whole if a in self.lies), None)
        if order is None or any(len(shape_of(a)) != len(order) for a in arrays):
            return False
        if not all(a in self.lies or self._is_free(a) for a in whole):
            return False
        self._set(out, self._elementwise_in(eqn, order), order)
        return True

    def _product(self, eqn: JaxprEqn) -> bool:
        """A batch of matrices in place of `eqn`, whose result lies as they make it."""
        [out] = eqn.outvars
        sides = [self._as_lying(a, s) for a, s in zip(eqn.invars, _sides(eqn), strict=True)]
        if _makes_most(eqn):
            sides, exchanged = self._as_read(eqn, sides)
        else:
            larger = max((0, 1), key=lambda n: nbytes(eqn.invars[n].aval))
            lying = self._at(eqn.invars[larger]).order
            pairs = [*range(len(sides[larger].summed))]
            pairs.sort(key=lambda p: lying.index(sides[larger].summed[p]))
            summed = [tuple(s.summed[p] for p in pairs) for s in sides]
            both = zip(sides, summed, strict=True)
            sides, exchanged = [dataclasses.replace(s, summed=own) for s, own in both], False
        places = self._places(eqn)
        which = (1, 0) if exchanged else (0, 1)
        operands = [self._matrices(eqn.invars[n], sides[n], eqn) for n in which]
        batch = len(sides[0].batch)
        order = [*range(batch), *(places[n][d] for n in which for d in sides[n].rows)]
        params = dict(eqn.params)
        precision = params["precision"]
        if exchanged and isinstance(precision, tuple):
            params["precision"] = precision[::-1]
        numbers = [numbers for _, numbers in operands]
        params["dimension_numbers"] = (
            tuple(summed for _, summed in numbers),
            tuple(batches for batches, _ in numbers),
        )
        aval: Any = out.aval
        shape = tuple(aval.shape[d] for d in order)
        rows = [math.prod(shape_of(eqn.invars[n])[d] for d in sides[n].rows) for n in which]
        made = compat.new_var(aval.update(shape=(*shape[:batch], *rows)))
        operand_vars = [v for v, _ in operands]
        self.eqns.append(eqn.replace(invars=operand_vars, outvars=[made], params=params))
        split = functools.partial(lax.reshape, new_sizes=shape)
        stored = made if shape == shape_of(made) else self._splice(split, [made], eqn)
        self._set(out, stored, order)
        return True

    def _as_lying(self, a: Atom, side: _Side) -> _Side:
        """`side` with its rows in the order in which they lie."""
        order = self._at(a).order
        return dataclasses.replace(side, rows=tuple(sorted(side.rows, key=order.index)))

    def _places(self, eqn: JaxprEqn) -> list[dict[int, int]]:
        """For each operand the dimension of the result that each of its rows is."""
        left, right = _sides(eqn)
        at = len(left.batch)
        first = {d: at + i for i, d in enumerate(left.rows)}
        return [first, {d: at + len(first) + i for i, d in enumerate(right.rows)}]

    def _as_read(self, eqn: JaxprEqn, sides: list[_Side]) -> tuple[list[_Side], bool]:
        """`sides` with their rows in the order in which the result is reduced, and whether those of
        the left operand are the last."""
        wanted, places = self._reduced_order(eqn.outvars[0]), self._places(eqn)
        sides = [
            dataclasses.replace(s, rows=tuple(sorted(s.rows, key=lambda d: wanted.index(at[d]))))
            for s, at in zip(sides, places, strict=True)
        ]
        return sides, wanted[-1] in places[0].values()

    def _reduced_order(self, v: Var) -> Order:
        """The dimensions of `v` in the order that they have where what is computed of it is reduced,
        or where that ends."""
        pending: list[tuple[Var, Order]] = [(v, tuple(range(len(shape_of(v)))))]
        last = pending[0][1]
        for _ in range(_MOST_VISITS):
            if not pending:
                break
            a, order = pending.pop(0)
            for i in self.readers.get(a, ()):
                eqn = self.old[i]
                if is_reduction(eqn):
                    return order
                [out, *_] = eqn.outvars
                if eqn.primitive.name == "transpose":
                    last = tuple(order[d] for d in eqn.params["permutation"])
                    pending.append((out, last))
                elif eqn.primitive.name in _SAME_SHAPE and shape_of(out) == shape_of(a):
                    pending.append((out, order))
        return last

    def _matrices(self, a: Atom, side: _Side, like: JaxprEqn) -> tuple[Atom, tuple[Order, Order]]:
        """`a` as a batch of matrices, and which of its dimensions are batches, and are summed."""
        lies = self._at(a)
        if side.is_matrix:
            at = lies.order.index
            return lies.stored, (tuple(map(at, side.batch)), tuple(map(at, side.summed)))
        rows_first = lies.order.index(side.rows[-1]) < lies.order.index(side.summed[0])
        inner = (side.rows, side.summed) if rows_first else (side.summed, side.rows)
        order = (*side.batch, *inner[0], *inner[1])
        size = shape_of(a)
        shape = *(size[d] for d in side.batch), *(math.prod(size[d] for d in i) for i in inner)
        assert isinstance(a, Var)
        if (a, order, shape) not in self.matrices:
            stored = self._in_order(a, order, like)
            merge = functools.partial(lax.reshape, new_sizes=shape)
            self.matrices[a, order, shape] = self._splice(merge, [stored], like)
        batch = len(side.batch)
        return self.matrices[a, order, shape], (tuple(range(batch)), (batch + rows_first,))
