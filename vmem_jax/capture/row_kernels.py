"""row_kernels: softmaxes of rows that XLA reads once for each of their reductions, and once more.

What library kernels read of such a softmax, its weights and the gradient to its scores, each one
kernel can make of what other library kernels made: the scores, the gradient to the weights, the bits
of a dropout mask. It computes the maxima and sums of its rows itself. So none of them exists, and
nothing that has an element for each score but these results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.beside_rows import FLOATING, REDUCTIONS, Kind, keeps, kind_of, spreads
from vmem_jax.capture.bits import BITS
from vmem_jax.capture.def_use import makers, readers
from vmem_jax.capture.primitives import Class, class_of, shape_of
from vmem_jax.capture.softmax import fits, maxima, reduces_rows
from vmem_jax.capture.tiles import IN_TILES
from vmem_jax.capture.transposes import moves_elements
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var

_MOST_EQUATIONS = 100
"""Of a kernel, at most: those of an attention with a mask and dropout have some thirty."""

_MOST_OPERANDS = 4
"""With an element or a bit for each score, at most: more of them do not stay in registers."""

_LEAST = 2**20
"""Elements of the smallest array of rows. Smaller ones stay in the cache between XLA's kernels."""


@dataclasses.dataclass(frozen=True)
class RowKernel:
    """What one kernel makes of rows.

    Attributes:
      equations: of the flat jaxpr, indices in order.
      operands: what they read.
      made: the result.
    """

    equations: tuple[int, ...]
    operands: tuple[Var, ...]
    made: Var

    def of(self, twin: Mapping[Var, Var]) -> RowKernel:
        """The same in a jaxpr with the same equations, whose variables are those of `twin`."""
        return RowKernel(self.equations, tuple(twin[v] for v in self.operands), twin[self.made])


def find_row_kernels(flat: ClosedJaxpr) -> tuple[RowKernel, ...]:
    """The kernels of all softmaxes of `flat` that XLA does not make one kernel of, in order."""
    eqns = compat.open_jaxpr(flat).eqns
    by = {v: eqn for eqn in eqns for v in eqn.outvars}
    softmaxes = [eqn.outvars[0] for eqn in eqns if maxima(eqn, by, may_choose=True) is not None]
    softmaxes = [v for v in softmaxes if _is_read_in_passes(v)]
    if not softmaxes:
        return ()
    finder = _Finder(flat)
    found = {kernel.made: kernel for v in softmaxes for kernel in finder.kernels(v)}
    return tuple(sorted(found.values(), key=lambda kernel: kernel.equations[-1]))


def _is_read_in_passes(exponentials: Var) -> bool:
    shape = shape_of(exponentials)
    return not fits(shape) and math.prod(shape) >= _LEAST and shape[-1] > 1


class _Finder:
    def __init__(self, flat: ClosedJaxpr) -> None:
        opened = compat.open_jaxpr(flat)
        self.eqns: list[JaxprEqn] = opened.eqns
        self.maker, self.readers = makers(self.eqns), readers(self.eqns)
        self.outputs = {a for a in opened.outvars if isinstance(a, Var)}

    def kernels(self, exponentials: Var) -> list[RowKernel]:
        """All that a softmax needs; none if anything but they and library kernels reads its rows or
        what these reduce to."""
        *rows, length = shape_of(exponentials)
        size = math.prod(rows), length
        wanted: dict[Var, None] = {}
        seen, pending = {exponentials}, [exponentials]
        while pending:
            v = pending.pop()
            if v in self.outputs:
                return []
            for j in self.readers.get(v, ()):
                if self._is_inside(self.eqns[j], size):
                    out = self.eqns[j].outvars[0]
                    if out not in seen:
                        seen.add(out)
                        pending.append(out)
                elif kind_of(v, size) is Kind.ROWS and self._is_by_library(j):
                    wanted[v] = None
                else:
                    return []
        found = [self._kernel(v, size) for v in wanted]
        return [kernel for kernel in found if kernel is not None] if all(found) else []

    def _is_by_library(self, j: int) -> bool:
        """Whether equation `j` is a kernel of a library, or a view that only such kernels read."""
        eqn = self.eqns[j]
        if class_of(eqn) is not Class.VIEW:
            return class_of(eqn) is Class.HEAVY
        [out] = eqn.outvars
        return out not in self.outputs and all(map(self._is_by_library, self.readers.get(out, ())))

    def _is_inside(self, eqn: JaxprEqn, size: tuple[int, int]) -> bool:
        """Whether a kernel of rows of that size computes `eqn`."""
        name = eqn.primitive.name
        if len(eqn.outvars) != 1 or eqn.effects:
            return False
        kind = kind_of(eqn.outvars[0], size)
        if kind is Kind.OTHER:
            return False
        if name in ("iota", "unpack_bits"):
            return kind is Kind.ROWS
        if name == "transpose" and moves_elements(eqn):
            return False
        kinds = [kind_of(a, size) for a in eqn.invars]
        if kind is not Kind.ROWS and Kind.OTHER in kinds:
            return False
        if name == "broadcast_in_dim":
            return len(kinds) == 1
        if keeps(eqn):
            return kinds == [kind]
        if name in REDUCTIONS:
            reduces = kinds == [Kind.ROWS] and reduces_rows(eqn)
            return reduces and eqn.invars[0].aval.dtype.name in FLOATING
        return name in IN_TILES and (kind is Kind.ROWS or Kind.ROWS not in kinds)

    def _kernel(self, made: Var, size: tuple[int, int]) -> RowKernel | None:
        """What makes `made` of what others make; None if it reduces nothing, or has too much."""
        equations: set[int] = set()
        operands: dict[Var, None] = {}
        pending: list[Any] = [made]
        seen: set[Var] = set()
        while pending:
            v = pending.pop()
            if isinstance(v, Literal) or v in seen:
                continue
            seen.add(v)
            i = self.maker.get(v)
            if i is None or not self._is_inside(self.eqns[i], size):
                operands[v] = None
                continue
            equations.add(i)
            pending += self._read(self.eqns[i], size, operands)
        many = math.prod(size) // BITS
        whole = [v for v in operands if math.prod(shape_of(v)) >= many]
        inside = [self.eqns[i] for i in equations]
        reduces = any(e.primitive.name in REDUCTIONS and not keeps(e) for e in inside)
        if not reduces or len(equations) > _MOST_EQUATIONS or len(whole) > _MOST_OPERANDS:
            return None
        return RowKernel(tuple(sorted(equations)), tuple(operands), made)

    def _read(
        self, eqn: JaxprEqn, size: tuple[int, int], operands: dict[Var, None]
    ) -> Iterator[Any]:
        """What `eqn` reads that may be made inside; adds the others to `operands`."""
        for a in eqn.invars:
            if eqn.primitive.name == "unpack_bits" or spreads(eqn, a, size):
                operands[a] = None
            else:
                yield a
