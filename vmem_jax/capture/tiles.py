"""tiles: what is computed element by element around convolutions, of values that exist.

Nothing here knows what a batch norm is: a tile is made of values of rows × channels and of one value
for each channel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vmem_jax import jax_compat as compat
from vmem_jax.capture.convolutions import match
from vmem_jax.capture.def_use import makers, readers
from vmem_jax.capture.fuse import fuse
from vmem_jax.capture.primitives import ELEMENTWISE, Class, class_of
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

IN_TILES = frozenset(
    """
abs add add_any and ceil clamp convert_element_type cos div eq exp exp2 expm1 floor ge gt
integer_pow is_finite le log log1p logistic lt max min mul ne neg not one_minus_square or pow rsqrt
select_n sign sin sqrt square stop_gradient sub tanh xor
""".split()
)
"""What is elementwise and Pallas for Triton lowers (JAX 0.10.2 to 0.12): `erf` it does not."""

MOST_EQUATIONS = 100
"""Behind a convolution, between it and its sums: a batch norm's backward pass has some ten."""


def convolves_in(flat: ClosedJaxpr, dtypes: Sequence[str]) -> bool:
    """Whether `flat` has a convolution of one of `dtypes`: looking for tiles takes longer."""
    return any(
        eqn.primitive.name == "conv_general_dilated" and eqn.invars[0].aval.dtype.name in dtypes
        for eqn in compat.open_jaxpr(flat).eqns
    )


@dataclasses.dataclass(frozen=True)
class Tile:
    """Elementwise equations on tiles of rows.

    Attributes:
      equations: of the flat jaxpr, indices in order.
      rows: the values of rows × channels that they read; `vectors` those of one value a channel.
      made: what is wanted of them.
    """

    equations: tuple[int, ...]
    rows: tuple[Var, ...]
    vectors: tuple[Var, ...]
    made: tuple[Var, ...]

    def of(self, twin: Mapping[Var, Var]) -> Tile:
        """The same in a jaxpr with the same equations, whose variables are those of `twin`."""
        return Tile(
            self.equations,
            *(tuple(twin[v] for v in every) for every in (self.rows, self.vectors, self.made)),
        )


@dataclasses.dataclass(frozen=True)
class Behind:
    """Values, and what is made of them.

    Attributes:
      values: these values.
      below: the equations that make the others, one bit each.
      maker: the equation of each value.
    """

    values: frozenset[Var]
    below: int
    maker: Mapping[Var, int]

    def __contains__(self, v: object) -> bool:
        i = self.maker.get(v) if isinstance(v, Var) else None
        return v in self.values or (i is not None and bool(self.below >> i & 1))


class Tiles:
    """The equations of a flat jaxpr, and the tiles in it.

    Attributes:
      eqns: the equations; indices are into it.
      outputs: what the jaxpr returns.
      maker: the equation of each value; `readers` those that read it.
      matches: the equations that are convolutions of a library.
      exists: the values that kernels write; `by_library` those that no fused kernel does. `virtual`
        are those that no longer exist.
    """

    def __init__(self, flat: ClosedJaxpr) -> None:
        opened = compat.open_jaxpr(flat)
        self.eqns: Sequence[JaxprEqn] = opened.eqns
        self.outputs = {a for a in opened.outvars if isinstance(a, Var)}
        self.maker = makers(self.eqns)
        self.readers = readers(self.eqns)
        kernels = fuse(flat)
        self.exists = {v for kernel in kernels for v in (*kernel.reads, *kernel.writes)}
        heavy = [k for k in kernels if class_of(self.eqns[k.root]) is Class.HEAVY]
        self.by_library = {v for kernel in heavy for v in kernel.writes}
        by = {v: eqn for eqn in self.eqns for v in eqn.outvars}
        found = {i: match(eqn, by) for i, eqn in enumerate(self.eqns)}
        self.matches = {i: m for i, m in found.items() if m is not None}
        self.virtual: set[Var] = set()

    def is_elementwise(self, v: Atom) -> bool:
        i = self.maker.get(v) if isinstance(v, Var) else None
        return i is not None and self.eqns[i].primitive.name in ELEMENTWISE

    def after(self, values: Collection[Var]) -> Behind:
        """`values`, and all that is made of them."""
        below = 0
        for v in values:
            for r in self.readers.get(v, ()):
                below |= 1 << r | self._below[r]
        return Behind(frozenset(values), below, self.maker)

    @functools.cached_property
    def _below(self) -> list[int]:
        """For each equation those that read what is made of it, one bit each."""
        found = [0] * len(self.eqns)
        for i in range(len(self.eqns) - 1, -1, -1):
            for v in self.eqns[i].outvars:
                for r in self.readers.get(v, ()):
                    found[i] |= 1 << r | found[r]
        return found

    def tile(
        self,
        wanted: Sequence[Any],
        shape: tuple[int, ...],
        given: dict[Any, None],
        after: Container[Var],
    ) -> Tile | None:
        """The elementwise equations from values that exist, and `given`, to `wanted`; None where
        there is none, or one of those values is in `after`."""
        equations: set[int] = set()
        rows: dict[Var, None] = {}
        vectors: dict[Var, None] = {}
        seen: set[Var] = set()

        def visit(a: Any, root: bool) -> bool:
            if isinstance(a, Literal):
                return np.ndim(a.val) == 0
            if a in seen or a in given:
                return True
            seen.add(a)
            if is_vector(a, shape):
                vectors[a] = None
                return a not in after
            if a.aval.shape != shape:
                return False
            i = self.maker.get(a, -1)
            eqn = None if i < 0 else self.eqns[i]
            if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
                [operand, *dynamic] = eqn.invars
                spread = eqn.params["broadcast_dimensions"]
                fits = isinstance(operand, Literal) or (
                    spread[-1:] == (len(shape) - 1,) and is_vector(operand, shape)
                )
                equations.add(i)
                return not dynamic and fits and visit(operand, False)
            expands = eqn is not None and eqn.primitive.name in IN_TILES
            exists = a in self.exists and a not in self.virtual and not root
            if self.is_elementwise(a) and not expands and not exists:
                return False
            if eqn is not None and expands and not (exists and a not in after):
                equations.add(i)
                return len(equations) < MOST_EQUATIONS and all(visit(b, False) for b in eqn.invars)
            rows[a] = None
            return a not in after

        roots = {v for v in wanted if v in after or not given or v in self.virtual}
        if not all(visit(v, v in roots) for v in wanted):
            return None
        return Tile(tuple(sorted(equations)), tuple(rows), tuple(vectors), tuple(wanted))


def is_vector(a: Atom, shape: tuple[int, ...]) -> bool:
    """Whether `a` has one value for each channel of arrays of `shape`."""
    own = a.aval.shape
    floats = jax.numpy.issubdtype(a.aval.dtype, jax.numpy.floating)
    return floats and own[-1:] == shape[-1:] and math.prod(own) == shape[-1]
