"""sliced: the equations on samples of a flat jaxpr, made again for some of the samples.

What depends on samples is sliced with them. What is as large as the batch without depending on its
samples (zeros, a dropout mask) is made for these alone where that can be done, or else cut out of
what is there for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.batch import Batch, follow_scan
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.def_use import makers
from vmem_jax.capture.layouts import SUMMED, Layout, Where, resized_params
from vmem_jax.capture.primitives import nbytes
from vmem_jax.capture.random_bits import can_slice, sliced_bits
from vmem_jax.capture.row_major import laid_out
from vmem_jax.capture.wanted_layouts import wanted
from vmem_jax.jax_compat import Atom, JaxprEqn, Literal, Var


class Slicer:
    """Emits the equations of one sub-batch.

    Args:
      eqns: the equations of all samples.
      size: samples in the sub-batch.
      offset: the first of them.
      calls: what they are emitted to.
      whole: gives the value of a variable that is the same for all samples, or an argument.
      stated: whether what is cut out of an argument is stated to lie as that does. XLA:GPU would give
        it the layout that one reader likes, and so all that is computed with it (`row_major`).
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        batch: Batch,
        size: int,
        offset: Var,
        calls: Calls,
        whole: Callable[[Var], Atom],
        stated: bool = False,
    ) -> None:
        self.batch, self.size, self.offset, self.calls = batch, size, offset, calls
        self.whole, self.stated = whole, stated
        self.maker = makers(eqns)
        self.eqns = eqns
        self.env: dict[Var, Atom] = {}
        self._sliced: dict[tuple[Var, Layout], Atom] = {}
        self._prices: dict[tuple[Var, Layout], int] = {}

    def emit(self, i: int) -> None:
        """Emits equation `i`."""
        eqn, wants = self.eqns[i], self.batch.wants[i]
        invars = [self.read(a, want, eqn) for a, want in zip(eqn.invars, wants, strict=True)]
        if i in self.batch.rows:
            invars[1] = self._own_rows(invars[1], self.batch.rows[i], eqn)
        if eqn.primitive.name == "scan":
            outs: Sequence[Atom] = self._scan(eqn, invars)
        else:
            values = [self.batch.of(v) for v in eqn.outvars]
            layouts = [SUMMED if v.summed >= 0 else v.layout for v in values]
            outs = self._resized(eqn, invars, wants, layouts)
        self.env.update(zip(eqn.outvars, outs, strict=True))

    def read(self, atom: Atom, want: Where, like: JaxprEqn) -> Atom:
        """What stands for `atom` here, with its samples as `want` says."""
        if isinstance(atom, Literal):
            return atom
        is_whole = want is not None and self.batch.of(atom).layout is None
        if atom in self.env and not is_whole:
            return self.env[atom]
        return self.whole(atom) if want is None else self._slice(atom, want, like)

    def hold(self, parts: Mapping[Var, Atom], layout: Layout) -> None:
        """From here on `parts` stand for these samples of what is there for all of them."""
        self._sliced.update(((v, layout), part) for v, part in parts.items())

    def _resized(
        self,
        eqn: JaxprEqn,
        invars: Sequence[Atom],
        ins: Sequence[Where],
        outs: Sequence[Any],
    ) -> list[Var]:
        params = resized_params(eqn, ins, outs, self.size)
        made = [
            compat.new_var(self._aval(v.aval, x)) for v, x in zip(eqn.outvars, outs, strict=True)
        ]
        self.calls.emit(eqn.replace(invars=list(invars), outvars=made, params=params))
        return made

    def _aval(self, aval: Any, layout: Any) -> Any:
        if not isinstance(layout, Layout):
            return aval
        return aval.update(shape=layout.shape(aval.shape, self.size))

    def _own_rows(self, indices: Atom, column: int, like: JaxprEqn) -> Atom:
        """`indices`, of which a column counts the samples of the batch, as that of a sub-batch."""

        def counted_from_here(indices: Any, offset: Any) -> Any:
            columns = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
            return indices - jnp.where(columns == column, offset, 0).astype(indices.dtype)

        return self.calls.bind(counted_from_here, [indices, self.offset], like)[0]

    def _slice(self, v: Var, layout: Layout, like: JaxprEqn) -> Atom:
        """The samples of this sub-batch of `v`, which is there for all of them, or can be made."""
        key = v, layout
        if key not in self._sliced:
            self._sliced[key] = self._make_slice(v, layout, like)
        return self._sliced[key]

    def _make_slice(self, v: Var, layout: Layout, like: JaxprEqn) -> Atom:
        wants = self._wants(v, layout)
        if wants is None or self._price(v, layout) > nbytes(v.aval):
            as_is = laid_out if self.stated and v not in self.maker else lambda x: x
            part = lambda x, offset: as_is(cut(x, offset, layout, self.batch.size, self.size))
            key = "cut", layout, as_is is laid_out
            return self.calls.bind(part, [self.whole(v), self.offset], like, key)[0]
        eqn = self.eqns[self.maker[v]]
        if eqn.primitive.name == "iota":
            make = lambda offset: _counted(eqn, offset, layout, self.batch.size, self.size)
            return self.calls.bind(make, [self.offset], eqn)[0]
        invars = [self.read(a, want, eqn) for a, want in zip(eqn.invars, wants, strict=True)]
        if eqn.primitive.name == "random_bits" and wants == [None]:
            bits = lambda key, offset: sliced_bits(
                eqn, key, offset, layout, self.batch.size, self.size
            )
            drawn = "bits", layout, v.aval, *sorted(eqn.params.items())
            return self.calls.bind(bits, [*invars, self.offset], eqn, drawn)[0]
        return self._resized(eqn, invars, wants, [layout])[0]

    def _price(self, v: Var, layout: Layout) -> int:
        """Bytes that are there for the whole batch where the samples of `v` are made for a part."""
        key = v, layout
        if key not in self._prices:
            wants, price = self._wants(v, layout), 0
            if wants is not None:
                for a, want in zip(self.eqns[self.maker[v]].invars, wants, strict=True):
                    if isinstance(a, Var) and want is not None:
                        price += self._price(a, want)
            elif v in self.maker:
                price = nbytes(v.aval)
            self._prices[key] = min(price, nbytes(v.aval))
            if wants is not None and price > nbytes(v.aval):
                self._prices[key] = nbytes(v.aval) + 1  # made for the whole batch itself
        return self._prices[key]

    def _wants(self, v: Var, layout: Layout) -> list[Where] | None:
        """How the operands of what makes `v` must lie, so that it lies like `layout`."""
        i = self.maker.get(v)
        if i is None or i in self.batch.early or not self.batch.values[v].is_same:
            return None
        eqn = self.eqns[i]
        if len(eqn.outvars) != 1:
            return None
        if eqn.primitive.name == "random_bits" and can_slice(eqn):
            return [None]
        return wanted(eqn, layout, self.batch.size)

    def _scan(self, eqn: JaxprEqn, invars: Sequence[Atom]) -> list[Atom]:
        """Emits a scan on the samples of this sub-batch."""
        batch, size = self.batch, self.size
        read = [batch.of(a) for a in eqn.invars]
        followed = follow_scan(eqn, read, batch.size)
        assert followed is not None, "a scan that mixes samples is late"
        body, closed = followed.body, followed.closed
        opened = compat.open_jaxpr(closed)
        consts, carry = compat.scan_counts(eqn)
        equations: list[JaxprEqn] = []
        offset = compat.new_var(self.offset.aval)
        given = {
            v: compat.new_var(self._aval(v.aval, body.values[v].layout)) for v in opened.invars
        }
        same: dict[Var, Atom] = {**{v: v for v in opened.constvars}, **given}
        calls = Calls(equations.append)

        def whole(v: Var) -> Atom:
            if v in inner.env:  # made beside what is split, as by a barrier of both
                return inner.env[v]
            if v not in same:
                made = opened.eqns[inner.maker[v]]
                operands = [a if isinstance(a, Literal) else whole(a) for a in made.invars]
                outs = [compat.new_var(o.aval) for o in made.outvars]
                equations.append(made.replace(invars=operands, outvars=outs))
                same.update(zip(made.outvars, outs, strict=True))
            return same[v]

        inner = Slicer(opened.eqns, body, size, offset, calls, whole)
        inner.env.update(given)
        for i, e in enumerate(opened.eqns):
            if body.is_split(i, e):
                inner.emit(i)
        last = opened.eqns[-1] if opened.eqns else eqn
        wants = [v.layout for v in followed.outs]
        wants = [w if n < carry or w is None else w.at(w.dim - 1) for n, w in enumerate(wants)]
        outvars = [inner.read(a, w, last) for a, w in zip(opened.outvars, wants, strict=True)]
        sliced = compat.close(
            opened.constvars,
            compat.constants(closed),
            [offset, *given.values()],
            outvars,
            equations,
            closed,
        )
        return self.calls.scan(sliced, 1 + consts, carry, [self.offset, *invars], eqn)


def opened(shape: Sequence[int], layout: Layout, size: int) -> tuple[int, ...]:
    """`shape` with the samples along a dimension of their own, if anything stands in front."""
    if layout.outer == 1:
        return tuple(shape)
    parts = (layout.outer, size, layout.inner)
    return (*shape[: layout.dim], *parts, *shape[layout.dim + 1 :])


def _starts(x: Any, offset: Any, layout: Layout) -> list[Any]:
    """Where the samples from `offset` on begin in `x`, of the shape that `opened` gives."""
    starts = [jnp.int32(0)] * x.ndim
    if layout.outer == 1:
        starts[layout.dim] = offset * layout.inner if layout.inner > 1 else offset
    else:
        starts[layout.dim + 1] = offset
    return starts


def cut(x: Any, offset: Any, layout: Layout, whole: int, size: int) -> Any:
    """The `size` samples from `offset` on."""
    shape = x.shape
    x = x.reshape(opened(shape, layout, whole))
    sizes = opened(layout.shape(shape, size), layout, size)
    starts = _starts(x, offset, layout)
    cut = lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    return cut.reshape(layout.shape(shape, size))


def put(whole: Any, part: Any, offset: Any, layout: Layout, size: int) -> Any:
    """`whole` with the samples from `offset` on; its shape is that of `opened`."""
    part = part.reshape(opened(part.shape, layout, size))
    starts = _starts(whole, offset, layout)
    return lax.dynamic_update_slice(whole, part, starts, allow_negative_indices=False)


def _counted(eqn: JaxprEqn, offset: Any, layout: Layout, whole: int, size: int) -> Any:
    """The part of an iota."""
    shape, dim = layout.shape(eqn.params["shape"], size), eqn.params["dimension"]
    here = lax.broadcasted_iota(jnp.int32, shape, dim)
    if dim == layout.dim:
        block = size * layout.inner
        here = here + offset * layout.inner
        if layout.outer > 1:
            here = here + (lax.broadcasted_iota(jnp.int32, shape, dim) // block) * (
                (whole - size) * layout.inner
            )
    return here.astype(eqn.params["dtype"])
