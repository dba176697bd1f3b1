"""reduced_rows: what is computed of rows and of what these reduce to, as one kernel, a JAX primitive.

The weights of an attention are a softmax of its scores, and the gradient to the scores is made of the
weights and of a sum of each row. XLA reduces a row in the kernel that reads it only where rows nearly
fill a power of two (`capture.softmax`); others it reads once for each reduction and once more. Here
one kernel, in Pallas for Triton, reads each row once, whatever its length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jexc

from vmem_jax import jax_compat as compat
from vmem_jax.capture.beside_rows import FLOATING, Kind, dimensions, keeps, kind_of, spreads
from vmem_jax.capture.bits import BITS
from vmem_jax.capture.primitives import shape_of
from vmem_jax.conv.elementwise import ByText, computed
from vmem_jax.conv.triton import register
from vmem_jax.jax_compat import JaxprEqn, Literal, Var

reduced_rows_p = jexc.Primitive("reduced_rows")
reduced_rows_p.multiple_results = True

_REDUCERS: dict[str, tuple[Callable[..., jax.Array], float]] = {
    "reduce_sum": (jnp.sum, 0.0),
    "reduce_max": (jnp.max, -math.inf),
}
"""What a row is reduced by, in float32, and what that makes of no elements."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How rows are divided among programs.

    Attributes:
      rows: of a program, a power of two that divides all rows.
      columns: the power of two that a row fits in; what is behind its end is not read.
      warps: of a program.
    """

    rows: int
    columns: int
    warps: int


_ELEMENTS, _OF_WARP = 1024, 512
"""Of a program, where rows are not longer, and of each of its warps: 16 of a thread. With 2,048 and
four warps an H200 takes 1.07 and 1.13 times as long for the weights and the gradient of ViT-L/16's
scores (`benchmarks/results/softmaxes_h200.jsonl`)."""
_LONGEST = 4096
"""Elements of a row, at most: eight warps have one."""


def tiling_of(rows: int, length: int) -> Tiling | None:
    """That of `rows` rows of `length` elements; None where they are too long, or their elements are
    too many to be counted in 32 bits."""
    columns = 2 ** (length - 1).bit_length()
    if columns > _LONGEST or rows * length >= 2**31:
        return None
    together = math.gcd(rows, max(1, _ELEMENTS // columns))
    return Tiling(together, columns, max(1, together * columns // _OF_WARP))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ReducedRows(ByText):
    """What the primitive computes.

    Attributes:
      equations: in order. Values have an element for each of the rows, or one a row, or are numbers.
      operands: what they read. Of these broadcasts may read other shapes, and `unpack_bits` bytes.
      made: the result, which has the shape of the rows.
    """

    equations: tuple[JaxprEqn, ...]
    operands: tuple[Any, ...]
    made: Any

    @property
    def groups(self) -> Sequence[Sequence[Any]]:
        return self.operands, [self.made]

    @property
    def size(self) -> tuple[int, int]:
        """How many rows there are, and the elements of each."""
        *rows, length = self.made.aval.shape
        return math.prod(rows), length

    @property
    def tiling(self) -> Tiling | None:
        """That of its kernel; None where XLA's passes do it."""
        return tiling_of(*self.size)

    @property
    def computed(self) -> float:
        """Elements that are computed for each of its rows': those behind their ends count."""
        tiling, (_, length) = self.tiling, self.size
        return 1.0 if tiling is None else tiling.columns / length


@reduced_rows_p.def_abstract_eval
def _abstract(*operands: Any, reduced: ReducedRows) -> list[Any]:
    del operands
    return [jax.core.ShapedArray(reduced.made.aval.shape, reduced.made.aval.dtype)]


def by_passes(*operands: jax.Array, reduced: ReducedRows) -> list[jax.Array]:
    """The result as XLA runs it: its equations, one by one."""
    values = dict(zip(reduced.operands, operands, strict=True))
    read = lambda a: a.val if isinstance(a, Literal) else values[a]
    for eqn in reduced.equations:
        values[eqn.outvars[0]] = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
    return [values[reduced.made]]


def in_tiles(
    reduced: ReducedRows, tiling: Tiling, *operands: jax.Array, interpret: bool = False
) -> jax.Array:
    """The same by one kernel.

    Args:
      interpret: whether it is interpreted, by JAX, on whatever device there is.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, length = reduced.size
    count = functools.partial(jnp.arange, dtype=jnp.int32)

    def kernel(*refs: Any) -> None:
        *inputs, output = refs
        row = pl.program_id(0) * tiling.rows + count(tiling.rows)[:, None]
        of = dict(zip(reduced.operands, inputs, strict=True))
        tile = _Tile(reduced, row, count(tiling.columns)[None, :], of, triton.load)
        triton.store(output.at[tile.elements], tile.made(), mask=tile.inside)

    found = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows * length,), reduced.made.aval.dtype),
        grid=(rows // tiling.rows,),
        interpret=interpret,
        **({} if interpret else compat.triton_params(tiling.warps, 1)),
    )(*(x.reshape(-1) for x in operands))
    return found.reshape(reduced.made.aval.shape)


class _Tile:
    """The values of so many rows, in one program.

    Args:
      row, column: the numbers of its rows, (rows, 1), and of their elements, (1, columns).
      of: where each operand is, as a vector.
      load: reads elements of such a vector by their numbers, and a mask.
    """

    def __init__(
        self,
        reduced: ReducedRows,
        row: jax.Array,
        column: jax.Array,
        of: dict[Any, Any],
        load: Callable[..., jax.Array],
    ) -> None:
        self.reduced, self.size = reduced, reduced.size
        self.row, self.column, self.of, self.load = row, column, of, load
        self.shape = row.shape[0], column.shape[1]
        length = self.size[1]
        self.elements = jnp.broadcast_to(row * length + column, self.shape)
        self.inside = jnp.broadcast_to(column < length, self.shape)
        self.values: dict[Any, jax.Array] = {}

    def made(self) -> jax.Array:
        for eqn in self.reduced.equations:
            self.values[eqn.outvars[0]] = self._computed(eqn)
        return jnp.broadcast_to(self._read(self.reduced.made), self.shape)

    def _computed(self, eqn: JaxprEqn) -> jax.Array:
        name, [out] = eqn.primitive.name, eqn.outvars
        if name == "iota":
            return self._numbers(out.aval.shape, eqn.params["dimension"]).astype(out.aval.dtype)
        if name == "unpack_bits":
            return self._bits(eqn)
        if name in _REDUCERS and not keeps(eqn):
            return self._reduced(eqn)
        spread = lambda a: self._spread(eqn, a) if spreads(eqn, a, self.size) else self._read(a)
        operands = [*map(spread, eqn.invars)]
        if keeps(eqn):
            return operands[0]
        if name == "div" and operands[1].shape[1] == 1 and out.aval.dtype.name in FLOATING:
            return self._divided(eqn, *operands)
        shape = self.shape[0], max(x.shape[1] for x in operands)
        return computed(eqn, [jnp.broadcast_to(x, shape) for x in operands])

    def _divided(self, eqn: JaxprEqn, x: jax.Array, by: jax.Array) -> jax.Array:
        """One division for a row or all. By a number XLA multiplies with its reciprocal, too, in the
        type of both."""
        dtype = eqn.outvars[0].aval.dtype
        once = 1 / by.astype(jnp.float32)
        if isinstance(eqn.invars[1], Literal):
            once = once.astype(dtype).astype(jnp.float32)
        return (x.astype(jnp.float32) * once).astype(dtype)

    def _read(self, a: Any) -> jax.Array:
        if isinstance(a, Literal):
            aval: Any = a.aval
            return jnp.full((self.shape[0], 1), a.val, aval.dtype)
        if a not in self.values:
            self.values[a] = self._loaded(a)
        return self.values[a]

    def _loaded(self, v: Var) -> jax.Array:
        kind = kind_of(v, self.size)
        if kind is Kind.ROWS:
            return self._there(v, self.elements)
        return self.load(self.of[v].at[self.row if kind is Kind.EACH else jnp.zeros_like(self.row)])

    def _there(self, v: Var, at: jax.Array) -> jax.Array:
        """Elements `at` of `v`; zeros behind the ends of rows."""
        at = jnp.broadcast_to(at, self.shape)
        zero = jnp.zeros((), self.of[v].dtype)
        return self.load(self.of[v].at[at], mask=self.inside, other=zero)

    def _reduced(self, eqn: JaxprEqn) -> jax.Array:
        by, of_none = _REDUCERS[eqn.primitive.name]
        x = jnp.broadcast_to(self._read(eqn.invars[0]), self.shape).astype(jnp.float32)
        if self.size[1] < self.shape[1]:
            x = jnp.where(self.inside, x, jnp.full_like(x, of_none))
        return by(x, axis=1, keepdims=True).astype(eqn.outvars[0].aval.dtype)

    def _numbers(self, shape: Sequence[int], dim: int) -> jax.Array:
        """Of each element its number along dimension `dim` of rows in an array of `shape`."""
        if dim == len(shape) - 1:
            return self.column
        inner = self.row // math.prod(shape[dim + 1 : -1])
        return inner % shape[dim] if math.prod(shape[:dim]) > 1 else inner

    def _spread(self, eqn: JaxprEqn, v: Var) -> jax.Array:
        shape, [out] = shape_of(v), eqn.outvars
        at = jnp.zeros_like(self.row)
        for k, dim in enumerate(dimensions(eqn, v)):
            if shape[k] > 1:
                at = at + self._numbers(shape_of(out), dim) * math.prod(shape[k + 1 :])
        return self._there(v, at)

    def _bits(self, eqn: JaxprEqn) -> jax.Array:
        [packed], [out] = eqn.invars, eqn.outvars
        axis, shape = eqn.params["axis"], packed.aval.shape
        at = jnp.zeros_like(self.row)
        for dim in range(len(shape)):
            number = self._numbers(out.aval.shape, dim)
            number = number // BITS if dim == axis else number
            at = at + number * math.prod(shape[dim + 1 :])
        bit = jnp.broadcast_to(1 << self._numbers(out.aval.shape, axis) % BITS, self.shape)
        return self._there(packed, at).astype(jnp.int32) & bit != 0


def _on_cuda(*operands: jax.Array, reduced: ReducedRows) -> list[jax.Array]:
    tiling = reduced.tiling
    if tiling is None:
        return by_passes(*operands, reduced=reduced)
    return [in_tiles(reduced, tiling, *operands)]


register(reduced_rows_p, by_passes, jax.jit(_on_cuda, static_argnames="reduced"))
