"""normalising: convolutions that can normalise their operand as they load it, and sum their result.

What is found is of any batch norm over batch and space, channels last: an operand that is the maximum
with zero of something affine in a value that exists, with one factor and one summand a channel; and
sums over all but the channels of a result and of its squares. A gradient to w reads the same operand.
An operand that only such convolutions read, and masks, need not exist: masks are made again. What
joins a residual exists, and so ends a chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from vmem_jax.capture.convolutions import Matched
from vmem_jax.capture.ties import COMPARISONS
from vmem_jax.capture.tiles import Tile, Tiles, convolves_in
from vmem_jax.core.convolution import Epilogue, Pass
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var

DTYPES = ("float16",)
"""Of what cuDNN has engines for."""


@dataclasses.dataclass(frozen=True)
class Prologue:
    """An operand max(affine(raw), 0).

    Attributes:
      operand: what need not exist.
      raw: what exists.
      vectors: what else is read, of one value a channel.
      equations: of the flat jaxpr, from these to `shifted`, which is affine in `raw`.
    """

    operand: Var
    raw: Var
    vectors: tuple[Var, ...]
    equations: tuple[int, ...]
    shifted: Var


@dataclasses.dataclass(frozen=True)
class Normalising:
    """A convolution with what its call can do besides.

    Attributes:
      equation: its, in the flat jaxpr.
      matched: it as the pass of a layer, with that prologue and epilogue.
      prologue: what makes its operand; None where that is read as it is. Those of one operand are
        of use together.
      sums: pairs of the equation of a sum, and 0 where it is of the result, 1 of its squares.
    """

    equation: int
    matched: Matched
    prologue: Prologue | None
    sums: tuple[tuple[int, int], ...]


def find_normalising(flat: ClosedJaxpr) -> tuple[Normalising, ...]:
    """In order of operands those with a prologue, then all forward passes with sums alone. A forward
    pass may be among both."""
    return tuple(_Finder(flat).found()) if convolves_in(flat, DTYPES) else ()


class _Finder(Tiles):
    def __init__(self, flat: ClosedJaxpr) -> None:
        super().__init__(flat)
        fits = lambda c: c.dtype in DTYPES and c.channels_last and c.groups == 1
        self.matches = {i: m for i, m in self.matches.items() if fits(m.convolution)}

    def found(self) -> Iterable[Normalising]:
        of = lambda which: [i for i, m in self.matches.items() if m.convolution.which == which]
        forward = of(Pass.FORWARD)
        for x in dict.fromkeys(self.eqns[i].invars[0] for i in forward):
            if isinstance(x, Var) and (readers := self._readers(x)):
                prologue = self._prologue(x)
                if prologue is not None:
                    yield from (self._normalising(i, prologue) for i in readers)
        for i in forward:
            if self._sums(i):
                yield self._normalising(i, None)

    def _readers(self, x: Var) -> list[int]:
        """The convolutions that read `x` as the x of their layer; none where others but masks do."""
        if x in self.outputs or not self.is_elementwise(x):
            return []
        found = []
        for r in self.readers[x]:
            eqn = self.eqns[r]
            reads = r in self.matches and eqn.invars[0] is x and eqn.invars[1] is not x
            if reads and self.matches[r].convolution.which != Pass.BACKWARD_DATA:
                found.append(r)
            elif eqn.primitive.name not in COMPARISONS:
                return []
        return found

    def _normalising(self, i: int, prologue: Prologue | None) -> Normalising:
        matched = self.matches[i]
        forward = matched.convolution.which == Pass.FORWARD
        convolution = dataclasses.replace(
            matched.convolution,
            prologue=prologue is not None,
            epilogue=Epilogue.SUMS if forward else Epilogue.NONE,  # cuDNN has no others
        )
        matched = dataclasses.replace(matched, convolution=convolution)
        return Normalising(i, matched, prologue, self._sums(i) if forward else ())

    def _prologue(self, x: Var) -> Prologue | None:
        aval: Any = x.aval
        tile = self.tile([x], aval.shape, {}, set())
        if tile is None or [v.aval for v in tile.rows] != [aval]:
            return None
        [raw] = tile.rows
        clamped = self._clamped(tile, raw, x)
        if clamped is None:
            return None
        of_relu = self.after({self.eqns[clamped].outvars[0]})
        equations = (i for i in tile.equations if self.eqns[i].outvars[0] not in of_relu)
        [shifted] = [a for a in self.eqns[clamped].invars if not self._is_zero(a)]
        assert isinstance(shifted, Var), "it depends on what is read"
        return Prologue(x, raw, tile.vectors, tuple(equations), shifted)

    def _clamped(self, tile: Tile, raw: Var, x: Var) -> int | None:
        """The equation of the maximum with zero, if what it is of is affine in `raw` and `x` is its
        result; else None."""
        affine, relu, clamped = {raw}, set[Var](), None
        for i in tile.equations:
            eqn, name, out = self.eqns[i], self.eqns[i].primitive.name, self.eqns[i].outvars[0]
            of = [a for a in eqn.invars if isinstance(a, Var) and a in affine | relu]
            if not of:
                continue
            if name == "copy" or (name == "convert_element_type" and _keeps(out)):
                (affine if of[0] in affine else relu).add(out)
            elif not relu.isdisjoint(of):
                return None
            elif name == "max" and len(of) == 1 and any(map(self._is_zero, eqn.invars)):
                relu.add(out)
                clamped = i
            elif name in ("add", "add_any", "sub", "neg") or _is_scaled(name, of, eqn.invars):
                affine.add(out)
            else:
                return None
        return clamped if x in relu else None

    def _is_zero(self, a: Any) -> bool:
        i = -1 if isinstance(a, Literal) else self.maker.get(a, -1)
        if i >= 0 and self.eqns[i].primitive.name == "broadcast_in_dim":
            [a, *_] = self.eqns[i].invars
        return isinstance(a, Literal) and not np.any(a.val)

    def _sums(self, i: int) -> tuple[tuple[int, int], ...]:
        """As `Normalising.sums`, in float32."""
        y: Any = self.eqns[i].outvars[0]
        found = []
        for wide in self._made_of(y, lambda eqn: eqn.primitive.name == "convert_element_type"):
            if wide.aval.dtype.name != "float32":
                continue
            found += [(r, 0) for r in self.readers.get(wide, ()) if self._is_sum(r, y)]
            for square in self._made_of(wide, _is_square):
                found += [(r, 1) for r in self.readers.get(square, ()) if self._is_sum(r, y)]
        return tuple(sorted(found))

    def _made_of(self, v: Any, is_wanted: Any) -> list[Any]:
        eqns = (self.eqns[r] for r in self.readers.get(v, ()))
        return [eqn.outvars[0] for eqn in eqns if is_wanted(eqn)]

    def _is_sum(self, r: int, y: Any) -> bool:
        eqn = self.eqns[r]
        channels = self.matches[self.maker[y]].numbers.out_spec[1]
        axes = tuple(d for d in range(y.aval.ndim) if d != channels)
        return eqn.primitive.name == "reduce_sum" and tuple(sorted(eqn.params["axes"])) == axes


def _keeps(cast: Any) -> bool:
    """Whether a cast only rounds as 16 bits do: one to integers or to 8 bits is a step of its own."""
    dtype = cast.aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 2


def _is_scaled(name: str, of: Sequence[Any], invars: Sequence[Any]) -> bool:
    """Whether one value is multiplied by, or divided by, what does not depend on it."""
    return len(of) == 1 and (name == "mul" or (name == "div" and invars[0] is of[0]))


def _is_square(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name == "integer_pow":
        return eqn.params["y"] == 2
    return name == "square" or (name == "mul" and eqn.invars[0] is eqn.invars[1])
