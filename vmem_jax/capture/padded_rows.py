"""padded_rows: rows of a softmax that are not aligned exist with more elements, on a GPU.

The scores of an attention over 197 tokens are rows of 197 elements, which start anywhere. XLA
(0.11.2) reads them element by element, and so it reads the operands of products: of 1,024 heads of 64
on an H200 in 62 to 68 us, where rows of whole vectors take 40 to 43.

So keys and values are padded with zeros, and all between their products that has their dimension is
longer (`tied_dimensions`): biases and masks are padded, scores are masked where they are reduced, and
what leaves is cut back. What the padding holds is followed (`paddings`), so that nothing is masked
without need. The weights of a classifier are padded likewise: the three products of GPT-2's head of
50,257 words take 7.5 ms, and aligned ones 3.4 (`core.machine`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.counted_masks import counted_values
from vmem_jax.capture.def_use import makers, readers
from vmem_jax.capture.draws import drawn_values
from vmem_jax.capture.editor import spliced
from vmem_jax.capture.paddings import Held, held_by
from vmem_jax.capture.primitives import Class, class_of, shape_of
from vmem_jax.capture.shards import is_typed
from vmem_jax.capture.softmax import maxima
from vmem_jax.capture.tied_dimensions import Place, made_of, tied
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var

_VECTOR = 8
"""Elements of 16 bits that are read at once: rows have a multiple of them."""

_BLOCK, _LONG = 256, 8192
"""The same of rows of so many elements or more. A product that sums over them may be divided, and XLA
copies what are not whole blocks: of 50,264 words to 50,432."""

_LARGER = 2
"""How many times larger than the keys the scores are at least. Windows of 49 tokens in heads of 32,
as Swin has them, gain nothing on an H200: padding takes what is saved."""

_PART = 8
"""How many times more elements there are than a small part has."""

Lengths = Mapping[tuple[int, ...], int]
"""Of the shape of an array of padded rows their length without padding."""


def with_padded_rows(flat: ClosedJaxpr, platform: str) -> tuple[ClosedJaxpr, Lengths]:
    """`flat` whose softmaxes are of padded rows, where these stay between products, and the lengths
    that these rows had.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
    """
    if platform != "gpu":
        return flat, {}
    eqns = compat.open_jaxpr(flat).eqns
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    softmaxes = [eqn.outvars[0] for eqn in eqns if _is_padded(eqn, maker)]
    if not softmaxes:
        return flat, {}
    found = _Tied(flat)
    longer: dict[Var, int] = {}
    for rows in softmaxes:
        longer |= {} if rows in longer else found.values_of(rows)
    if not longer:
        return flat, {}
    padder = _Padder(flat, longer)
    return padder.run(), padder.lengths()


def padded_length(length: int) -> int | None:
    """Elements of rows of `length` with their padding; None if they have none."""
    unit = _VECTOR if length < _LONG else _BLOCK
    return -(-length // unit) * unit if length > 1 and length % _VECTOR else None


def _is_padded(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> bool:
    """Whether `eqn` makes the exponentials of a softmax whose rows may be padded."""
    if maxima(eqn, maker, may_choose=True) is None or is_typed(eqn.outvars[0]):
        return False
    return padded_length(eqn.outvars[0].aval.shape[-1]) is not None


class _Tied:
    """What has the dimension of the rows of a softmax.

    Args:
      flat: the step.
    """

    def __init__(self, flat: ClosedJaxpr) -> None:
        opened = compat.open_jaxpr(flat)
        self.eqns: Sequence[JaxprEqn] = opened.eqns
        self.maker, self.readers = makers(opened.eqns), readers(opened.eqns)
        self.results = {a for a in opened.outvars if isinstance(a, Var)}
        self.drawn, self.counted = drawn_values(opened.eqns), counted_values(opened.eqns)

    def values_of(self, rows: Var) -> dict[Var, int]:
        """Which dimension of each value is the last one of `rows`; nothing if one as large as these
        has to be cut back, has it twice, or is made of nearly as much that has to be padded."""
        aval: Any = rows.aval
        size, last = aval.size, len(aval.shape) - 1
        pending, found = [(rows, last)], {rows: last}
        while pending:
            v, d = pending.pop()
            places = self._beside(v, d, size)
            if places is None:
                return {}
            for other, e in places:
                if other not in found:
                    found[other] = e
                    pending.append((other, e))
                elif found[other] != e:
                    return {}
        return found if all(self._pays(v, found) for v in found) else {}

    def _pays(self, v: Var, found: Mapping[Var, int]) -> bool:
        """Whether an operand that is padded to make `v` is much smaller. What is `found` has its
        padding."""
        made = self.maker.get(v)
        if made is None or self.eqns[made].primitive.name != "dot_general":
            return True
        eqn = self.eqns[made]
        source: Any = eqn.invars[made_of(eqn)[found[v]][0]]
        whole: Any = v.aval
        return source in found or _LARGER * source.aval.size <= whole.size

    def _beside(self, v: Var, d: int, size: int) -> list[Place] | None:
        """The places that one equation ties to dimension `d` of `v`; None if `v` has to be cut back.
        What is smaller than the rows, or only counted, may exist both ways."""
        aval: Any = v.aval
        twice = aval.size < size or v in self.counted
        readers = () if twice else (self.eqns[i] for i in self.readers.get(v, ()))
        read = [tied(eqn, v, d) for eqn in readers if not _reads_little(eqn, size)]
        if None in read or (v in self.results and not twice):
            return None
        made = self.maker.get(v)
        if made is not None and not self._is_drawn_mask(v):
            read.append(tied(self.eqns[made], v, d))
        return [place for places in read for place in places or ()]

    def _is_drawn_mask(self, v: Var) -> bool:
        """Whether `v` is a mask of random words, as for dropout: it is padded, and not these."""
        aval: Any = v.aval
        return aval.dtype == jnp.bool_ and v in self.drawn


class _Padder:
    """`flat` with padded rows, while it is put together.

    Args:
      longer: which dimension of each value is padded.
    """

    def __init__(self, flat: ClosedJaxpr, longer: Mapping[Var, int]) -> None:
        self.flat, self.longer = flat, longer
        self.eqns: list[JaxprEqn] = []
        self.eqn: JaxprEqn  # of `flat`, which is being added
        self.padded: dict[Var, Atom] = {}
        self.held: dict[Atom, Held] = {}  # by the padding of padded values
        self.there: set[Var] = set()  # values that exist as they were
        self.zeros: dict[tuple[Atom, tuple[int, ...]], Var] = {}  # values with zeros behind

    def run(self) -> ClosedJaxpr:
        opened = compat.open_jaxpr(self.flat)
        self.there.update((*opened.invars, *opened.constvars))
        for eqn in opened.eqns:
            self.eqn = eqn
            if eqn.primitive.name == "dot_general" and self._has_padding(eqn):
                self._multiply(eqn)
            elif self._grows(eqn):
                self._grow(eqn)
            elif (place := self._reduced(eqn)) is not None:
                self._reduce(eqn, *place)
            else:
                self._keep(eqn)
        for v in opened.outvars:
            self._cut(v)
        consts = compat.constants(self.flat)
        parts = opened.constvars, consts, opened.invars, opened.outvars, self.eqns
        return compat.close(*parts, like=self.flat)

    def lengths(self) -> Lengths:
        """Of each shape of padded rows the length that they had."""
        of = lambda a: a.aval.shape
        shapes = ((of(v), of(long)) for v, long in self.padded.items())
        return {long: own[-1] for own, long in shapes if own[-1] < long[-1]}

    def _has_padding(self, eqn: JaxprEqn) -> bool:
        return any(v in self.longer for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var))

    def _grows(self, eqn: JaxprEqn) -> bool:
        """Whether `eqn` makes a padded value of padded ones."""
        if len(eqn.outvars) != 1 or eqn.outvars[0] not in self.longer:
            return False
        places = tied(eqn, eqn.outvars[0], self.longer[eqn.outvars[0]])
        return places is not None and all(self.longer.get(v) == d for v, d in places)

    def _reduced(self, eqn: JaxprEqn) -> Place | None:
        """The padded dimension that `eqn` reduces."""
        v = eqn.invars[0] if eqn.invars else None
        if not isinstance(v, Var) or v not in self.longer or tied(eqn, v, self.longer[v]) != []:
            return None
        return v, self.longer[v]

    def _keep(self, eqn: JaxprEqn) -> None:
        """Adds `eqn`, which reads and makes values as they were."""
        for a in eqn.invars:
            self._cut(a)
        self.eqns.append(eqn)
        self.there.update(eqn.outvars)

    def _grow(self, eqn: JaxprEqn) -> None:
        """Adds `eqn` of padded values."""
        [out] = eqn.outvars
        aval: Any = out.aval
        operands = [self._long(a) for a in eqn.invars]
        shape = _longer(aval.shape, {self.longer[out]})
        self.padded[out] = compat.new_var(aval.update(shape=shape))
        named = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}
        name = named.get(eqn.primitive.name)
        params = {**eqn.params, name: shape} if name else eqn.params
        self.eqns.append(eqn.replace(invars=operands, outvars=[self.padded[out]], params=params))
        self.held[self.padded[out]] = held_by(eqn, [self._held(a) for a in operands])

    def _reduce(self, eqn: JaxprEqn, v: Var, d: int) -> None:
        """Adds the reduction `eqn` of dimension `d` of `v`."""
        self._mask(v, Held.ZEROS if eqn.primitive.name == "reduce_sum" else Held.LOWEST)
        self.eqns.append(eqn.replace(invars=[self._long(v)]))
        self.there.update(eqn.outvars)

    def _multiply(self, eqn: JaxprEqn) -> None:
        """Adds the product `eqn`, of which an operand or the result is padded."""
        [out], made = eqn.outvars, made_of(eqn)
        summed, batches = eqn.params["dimension_numbers"]
        sides = [self._own(a) - {*batch} for a, batch in zip(eqn.invars, batches, strict=True)]
        result = {d for d in self._own(out) if d >= len(batches[0])}
        for side, d in map(made.__getitem__, result):
            sides[side].add(d)
        for pair in zip(*summed, strict=True):
            padded = [a for a, d, dims in zip(eqn.invars, pair, sides, strict=True) if d in dims]
            self._bound(padded)
            for d, dims in zip(pair, sides, strict=True):
                dims |= {d} if padded else set()
        operands = [self._with(a, dims) for a, dims in zip(eqn.invars, sides, strict=True)]
        wide = {e for e, (side, d) in enumerate(made) if d in sides[side]}
        aval: Any = out.aval
        if not wide:
            self.eqns.append(eqn.replace(invars=operands))
            self.there.add(out)
            return
        long = compat.new_var(aval.update(shape=_longer(aval.shape, wide)))
        self.eqns.append(eqn.replace(invars=operands, outvars=[long]))
        if wide == result:
            self.padded[out] = long
            own = {self._held_in(eqn.invars[made[e][0]]) for e in wide}
            self.held[long] = own.pop() if len(own) == 1 else Held.ANYTHING
        else:
            self._cut_to(out, long)

    def _own(self, v: Atom) -> set[int]:
        """The dimension of `v` that is padded, if one is."""
        return {self.longer[v]} if isinstance(v, Var) and v in self.longer else set()

    def _held(self, long: Atom) -> Held | None:
        return self.held.get(long) if isinstance(long, Var) else None

    def _held_in(self, a: Atom) -> Held:
        """What the padding of an operand holds; zeros where it is made for one product."""
        return self.held[self._long(a)] if self._own(a) else Held.ZEROS

    def _bound(self, operands: Sequence[Atom]) -> None:
        """Has a product add nothing for the padding of `operands`; another operand has zeros."""
        for a in operands:
            if not self._held_in(a).is_bounded:
                self._mask(a, Held.ZEROS)
        if len(operands) == 2 and Held.ZEROS not in map(self._held_in, operands):
            self._mask(operands[0], Held.ZEROS)

    def _mask(self, a: Atom, held: Held) -> None:
        """Has the padding of `a` hold something else from now on."""
        assert isinstance(a, Var), "numbers have no padding"
        long, d = self._long(a), self.longer[a]
        if self.held[long] is held:
            return
        aval: Any = a.aval
        number = -jnp.inf if held is Held.LOWEST else 0
        mask = functools.partial(_masked, d=d, length=aval.shape[d], number=number)
        made, self.padded[a] = spliced(mask, [long], self.eqn)
        self.held[self.padded[a]] = held
        self.eqns += made

    def _long(self, a: Atom) -> Atom:
        """`a` with its padding: of zeros, where it existed without."""
        if not isinstance(a, Var) or a not in self.longer:
            return a
        if a not in self.padded:
            self.padded[a] = self._with_zeros(a, {self.longer[a]})
            self.held[self.padded[a]] = Held.ZEROS
        return self.padded[a]

    def _with(self, a: Atom, dims: set[int]) -> Atom:
        """`a`, of which `dims` are padded: with zeros, but for its own padded dimension."""
        own = self._own(a)
        if own <= dims:
            return self._with_zeros(self._long(a), dims - own)
        self._cut(a)
        return self._with_zeros(a, dims)

    def _with_zeros(self, a: Atom, dims: set[int]) -> Atom:
        key = a, (*sorted(dims),)
        if dims and key not in self.zeros:
            aval: Any = a.aval
            pad = functools.partial(_zeros_behind, shape=_longer(aval.shape, dims))
            made, self.zeros[key] = spliced(pad, [a], self.eqn)
            self.eqns += made
        return self.zeros[key] if dims else a

    def _cut(self, a: Atom) -> None:
        """Has `a` exist as it was."""
        if isinstance(a, Var) and a in self.padded and a not in self.there:
            self._cut_to(a, self.padded[a])

    def _cut_to(self, v: Var, long: Var) -> None:
        """Has `v` exist, the beginning of `long`."""
        aval: Any = v.aval
        cut = functools.partial(lax.slice, start_indices=(0,) * aval.ndim, limit_indices=aval.shape)
        self.eqns += spliced(cut, [long], self.eqn, v)[0]
        self.there.add(v)


def _reads_little(eqn: JaxprEqn, size: int) -> bool:
    """Whether `eqn` reads a small part of what has `size` elements, as that of the labels is: it may
    be cut back in the kernel that reads it."""
    made = max((math.prod(shape_of(v)) for v in eqn.outvars), default=0)
    return class_of(eqn) is Class.FUSIBLE and _PART * made <= size


def _longer(shape: Sequence[int], dims: set[int]) -> tuple[int, ...]:
    """`shape` with padding in `dims`."""
    return (*(padded_length(n) or n if d in dims else n for d, n in enumerate(shape)),)


def _zeros_behind(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x`, in front of zeros."""
    more = [(0, after - before, 0) for before, after in zip(x.shape, shape, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), more)


def _masked(x: jax.Array, d: int, length: int, number: float) -> jax.Array:
    """`x` with a number behind the first `length` elements of dimension `d`.

    Places are compared with those in another dimension, which are less, so that the kernel of the
    softmax compares them. A mask of one row XLA would make apart, and rows would share it: such a
    softmax takes 260 us on an H200 in place of 99 (1,024 heads of 197 tokens, rows of 256).
    """
    inside = lax.broadcasted_iota(jnp.int32, x.shape, d)
    beside = [e for e, n in enumerate(x.shape) if e != d and 1 < n <= length]
    if beside:
        inside = jnp.maximum(inside, lax.broadcasted_iota(jnp.int32, x.shape, beside[-1]))
    return jnp.where(inside < length, x, jnp.asarray(number, x.dtype))
