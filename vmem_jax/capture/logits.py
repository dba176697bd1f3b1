"""logits: the end of a step around its largest product, which can run on some tokens at a time.

The logits of a language model, tokens x vocabulary, and their gradient are the largest values of a
step. Nothing mixes tokens between them: the product that makes them, a softmax, what is picked of it,
the gradient, and the two products that take it to the hidden state and to the weights of the head.
This is found in the graph: the *tail* of a large product is all equations that values of its size
connect with it, and what lies between two of them. It reads and returns small values alone: sums over
tokens, and values of each token.

The tail is a jaxpr of its own, which `batch` follows along the tokens and `sub_batches` divides, as
they do with a whole step. A dimension of the weights serves as well, where no token stands alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vmem_jax import jax_compat as compat
from vmem_jax.capture.batch import Batch, Mixing, follow_batch
from vmem_jax.capture.def_use import makers, readers
from vmem_jax.capture.layouts import Layout
from vmem_jax.capture.locations import location_of
from vmem_jax.capture.primitives import Class, class_of, exchanges_operands, nbytes, shape_of
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var

_WIDE = 0.75
"""Of the elements of the product: a value with more of them is as large as the logits. Recurrent
networks may have no more than twice as many words as hidden values."""

_MOST_EQUATIONS = 1_000
"""In a tail: a loss and its gradient have some thirty."""

_TRIED = 4
"""Products that are looked at, the largest first: hidden values of a last layer may be larger."""


@dataclasses.dataclass(frozen=True)
class Tail:
    """The part of a step that can run in chunks of tokens.

    Attributes:
      equations: of the flat jaxpr, indices in order.
      backward: the first of them that a backward pass has; the one that makes the logits where none
        has.
      closed: they, as a jaxpr of their own.
      reads, returns: the values of the flat jaxpr that are its arguments and results.
      batch: it by tokens.
      nbytes: of the logits.
    """

    equations: tuple[int, ...]
    backward: int
    closed: ClosedJaxpr
    reads: tuple[Var, ...]
    returns: tuple[Var, ...]
    batch: Batch
    nbytes: int

    @property
    def size(self) -> int:
        """Tokens, or sequences, of which a chunk has some."""
        return self.batch.size


class _Part(NamedTuple):
    """Equations that may be a tail: their indices, and they as a jaxpr of their own."""

    equations: tuple[int, ...]
    inside: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    returns: tuple[Var, ...]
    closed: ClosedJaxpr


def find_tail(flat: ClosedJaxpr) -> Tail | str:
    """The tail of the largest product of `flat` that has one, or why there is none, for people."""
    finder = _Finder(flat)
    why = "no product of the forward pass makes a third more than it reads"
    for i in finder.products()[:_TRIED]:
        found = finder.tail(i)
        if isinstance(found, Tail):
            return found
        why = f"{location_of(finder.eqns[i])}: {found}"
    return why


class _Finder:
    def __init__(self, flat: ClosedJaxpr) -> None:
        self.flat, self.opened = flat, compat.open_jaxpr(flat)
        self.eqns: Sequence[JaxprEqn] = self.opened.eqns
        self.maker = makers(self.eqns)
        self.readers = readers(self.eqns)
        self.results = {a for a in self.opened.outvars if isinstance(a, Var)}

    def products(self) -> list[int]:
        """The products of the forward pass that make more than they read, by a third of it or more,
        the largest first and of equals the last."""
        found = []
        for i, eqn in enumerate(self.eqns):
            if eqn.primitive.name != "dot_general" or any(eqn.params["dimension_numbers"][1]):
                continue
            elements = lambda a: math.prod(shape_of(a))
            whole = elements(eqn.outvars[0])
            large = all(elements(a) <= _WIDE * whole for a in eqn.invars)
            if large and not _is_backward(eqn):
                found.append((-whole, -i))
        return [-i for _, i in sorted(found)]

    def tail(self, product: int) -> Tail | str:
        made = self._connected(product)
        if len(made) == 1:
            return "nothing reads it"
        if len(made) > _MOST_EQUATIONS:
            return "what follows it does more than to make a loss of it"
        if any(self.eqns[i].effects for i in made):
            return "something with an effect stands behind it"
        size = math.prod(shape_of(self.eqns[product].outvars[0]))
        whole = self._part(made)
        large = [v for v in whole.returns if math.prod(shape_of(v)) >= _WIDE * size]
        if large:
            eqn = self.eqns[self.maker[large[0]]]
            return f"what {location_of(eqn)} makes of it is as large, and is needed as a whole"
        why = "nothing in it is done token by token"
        for operand, dim, count in self._tokens(product):
            turned = self._turned(whole, operand)
            part = self._part(made | turned) if turned else whole
            batch = self._along(part, product, operand, dim, count)
            if not isinstance(batch, Batch):
                if batch.mixer >= 0:
                    why = f"{location_of(part.inside[batch.mixer])} needs all tokens at once"
                continue
            if self._is_whole(part.inside, batch, size):
                continue
            equations, logits = part.equations, nbytes(self.eqns[product].outvars[0].aval)
            backward = next((i for i in equations if _is_backward(self.eqns[i])), product)
            return Tail(equations, backward, part.closed, part.reads, part.returns, batch, logits)
        return why

    def _part(self, made: set[int]) -> _Part:
        """The equations of `made`, in which products make the transposes that alone read them."""
        exchanged = {i: j for i in made if (j := self._transposed(i)) is not None}
        equations = {*made, *exchanged.values()}
        inside = tuple(
            _exchanged(self.eqns[i], self.eqns[exchanged[i]].outvars[0])
            if i in exchanged
            else self.eqns[i]
            for i in sorted(made - {*exchanged.values()})
        )
        own = {v for eqn in inside for v in eqn.outvars}
        reads = tuple(
            dict.fromkeys(
                a for eqn in inside for a in eqn.invars if isinstance(a, Var) and a not in own
            )
        )
        outside = lambda v: (
            v in self.results or any(r not in equations for r in self.readers.get(v, ()))
        )
        returns = tuple(v for eqn in inside for v in eqn.outvars if outside(v))
        closed = compat.close([], [], list(reads), list(returns), inside, self.flat)
        return _Part(tuple(sorted(equations)), inside, reads, returns, closed)

    def _turned(self, part: _Part, operand: Var) -> set[int]:
        """The transpose that makes `operand` for `part` alone, and those that alone read what `part`
        returns in the shape of `operand`.

        A recurrent network makes hidden values token by token, and its head reads them by sequence.
        In the chunks each is transposed by itself; outside, all are, before the loop and behind it.
        """
        if self._turn(operand) is None or operand in self.results:
            return set()
        if not {*self.readers[operand]} <= {*part.equations}:
            return set()
        alike = [v for v in part.returns if shape_of(v) == shape_of(operand)]
        alone = [self.readers.get(v, []) for v in alike if v not in self.results]
        behind = [read[0] for read in alone if len(read) == 1 and _transposes(self.eqns[read[0]])]
        return {self.maker[operand], *behind}

    def _turn(self, operand: Var) -> JaxprEqn | None:
        """The transpose that makes `operand`, if one does."""
        eqn = self.eqns[self.maker[operand]] if operand in self.maker else None
        return eqn if eqn is not None and _transposes(eqn) else None

    def _along(
        self, part: _Part, product: int, operand: Var, dim: int, count: int
    ) -> Batch | Mixing:
        """`part` followed along dimension `dim` of `operand`, of the product's two."""
        read, layout, turn = operand, Layout(dim), self._turn(operand)
        if turn is not None and self.maker[operand] in part.equations:
            [read], layout = turn.invars, Layout(turn.params["permutation"][dim])
        # what has the shape of the tokens is cut like them, wherever it comes from
        ahead, operands = shape_of(operand)[: dim + 1], self.eqns[product].invars
        others = [v not in operands and shape_of(v)[: len(ahead)] == ahead for v in part.reads]
        layouts = [
            layout if v is read else Layout(dim) if other else None
            for v, other in zip(part.reads, others, strict=True)
        ]
        return follow_batch(part.closed, layouts, count)

    def _transposed(self, i: int) -> int | None:
        """The transpose that alone reads equation `i`, a product, and exchanges its operands' sides:
        a weight gradient, as JAX writes it."""
        eqn = self.eqns[i]
        readers = self.readers.get(eqn.outvars[0], ())
        if (
            eqn.primitive.name != "dot_general"
            or len(readers) != 1
            or eqn.outvars[0] in self.results
        ):
            return None
        return readers[0] if exchanges_operands(eqn, self.eqns[readers[0]]) else None

    def _connected(self, product: int) -> set[int]:
        """The equations that values as large as the product connect with it, and what lies between
        two of them."""
        size = math.prod(shape_of(self.eqns[product].outvars[0]))
        is_wide = lambda a: isinstance(a, Var) and math.prod(shape_of(a)) >= _WIDE * size
        found: set[int] = set()
        stack = [product]
        while stack:
            while stack:
                i = stack.pop()
                if i in found:
                    continue
                found.add(i)
                eqn = self.eqns[i]
                stack += [r for v in eqn.outvars if is_wide(v) for r in self.readers.get(v, ())]
                makers = [self.maker[a] for a in eqn.invars if is_wide(a) and a in self.maker]
                stack += [m for m in makers if _is_cheap(self.eqns[m])]
            stack = [*self._between(found) - found]
        return found

    def _between(self, ends: set[int]) -> set[int]:
        """The equations that depend on one of `ends` and lead up to one of them."""
        first, last = min(ends), max(ends)
        values: set[Any] = set()
        behind = set()
        for i in range(first, last + 1):
            eqn = self.eqns[i]
            if i in ends or any(a in values for a in eqn.invars if isinstance(a, Var)):
                behind.add(i)
                values.update(eqn.outvars)
        needed: set[Any] = set()
        found = set()
        for i in range(last, first - 1, -1):
            eqn = self.eqns[i]
            if i in ends or any(v in needed for v in eqn.outvars):
                needed.update(a for a in eqn.invars if isinstance(a, Var))
                if i in behind:
                    found.add(i)
        return found

    def _tokens(self, product: int) -> Iterator[tuple[Var, int, int]]:
        """(operand, dimension of the tokens, how many): the first of either operand that the product
        keeps, where it has a few, and else the longest. Of a transposed value the first is the one
        that was it before."""
        eqn = self.eqns[product]
        (contracted, _) = eqn.params["dimension_numbers"]
        for operand, gone in zip(eqn.invars, contracted, strict=True):
            if not isinstance(operand, Var):
                continue
            shape, turn = shape_of(operand), self._turn(operand)
            kept = [d for d in range(len(shape)) if d not in gone and shape[d] > 1]
            lies = range(len(shape)) if turn is None else turn.params["permutation"]
            for d in sorted(kept, key=lambda d: (shape[d] < _MOST_CHUNKS, lies[d])):
                yield operand, d, shape[d]

    def _is_whole(self, inside: Sequence[JaxprEqn], batch: Batch, size: int) -> bool:
        """Whether a value as large as the logits is there for all tokens at once."""
        wide = [
            v
            for i, eqn in enumerate(inside)
            for v in eqn.outvars
            if math.prod(shape_of(v)) >= _WIDE * size and class_of(eqn) is not Class.VIEW
        ]
        values = [batch.values[v] for v in wide]
        return any(v.late >= 0 or v.summed >= 0 for v in values)


_MOST_CHUNKS = 16
"""A dimension with fewer is no choice of tokens where another has more."""


def _exchanged(eqn: JaxprEqn, out: Var) -> JaxprEqn:
    """The product `eqn` with its operands exchanged, which makes `out`, its transpose: in a loop the
    sum is kept as its reader takes it."""
    a, b = eqn.invars
    (first, second), _ = eqn.params["dimension_numbers"]
    params = {**eqn.params, "dimension_numbers": ((second, first), ((), ()))}
    return eqn.replace(invars=[b, a], outvars=[out], params=params)


def _transposes(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "transpose"


def _is_cheap(eqn: JaxprEqn) -> bool:
    scatters = eqn.primitive.name in ("scatter-add", "scatter_add")  # a number at each label
    return scatters or class_of(eqn) in (Class.VIEW, Class.FUSIBLE)


def _is_backward(eqn: JaxprEqn) -> bool:
    return "transpose(" in compat.name_stack(eqn)
