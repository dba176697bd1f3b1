"""products: a 1×1 convolution as a matrix product, in one kernel with what stands around it.

A normalisation, a ReLU or a sum over the batch beside a convolution is a pass over memory as long as
the convolution itself. Here each tile of rows is read once: the operand of the product is computed
from it, and from the result what is stored or summed over all rows. In a backward pass the gradient
to the convolution's result is made once for both of its products.

The kernels are written in Pallas for Triton. Their result is computed transposed, so that most of a
sum over rows is one within a thread. In the layout of a product it would be one across threads, which
takes as long as the product.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.conv.triton import divided

Elementwise = Callable[..., Sequence[jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of one product of M rows and `weight` (A, B).

    Attributes:
      weight: (A, B).
      rows: arrays (M, A) that its operand is made of, and `vectors` (A,).
      result_rows: arrays (M, B) that are read behind it, and `result_vectors` (B,).
    """

    weight: jax.Array
    rows: Sequence[jax.Array]
    vectors: Sequence[jax.Array] = ()
    result_rows: Sequence[jax.Array] = ()
    result_vectors: Sequence[jax.Array] = ()

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """All of them, the weight last."""
        groups = (self.rows, self.vectors, self.result_rows, self.result_vectors)
        return (*(x for group in groups for x in group), self.weight)


@dataclasses.dataclass(frozen=True)
class Around:
    """What is computed before and behind a product, element by element.

    Attributes:
      before: of tiles of `rows` and (1, A) of `vectors` makes the operand, then `stored` arrays
        (M, A).
      behind: of the product in float32, tiles of `result_rows` and (1, B) of `result_vectors` makes
        `results` arrays (M, B), and then arrays in float32 that are summed over all rows. With
        `has_gradient` the first that it makes is x, and none of `results`.
      has_gradient: whether the gradient to the weight is summed, too: x transposed @ operand, where
        the operand is the gradient to the result of a convolution of x.
    """

    before: Elementwise
    behind: Elementwise
    stored: int = 0
    results: int = 1
    has_gradient: bool = False


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is divided among programs.

    Attributes:
      rows: of a tile, a divisor of M.
      columns: of the result in one program, a divisor of B.
      programs: for each block of columns; each takes tile after tile.
      warps: of a program.
      stages: tiles in flight.
    """

    rows: int
    columns: int
    programs: int
    warps: int
    stages: int


Made = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], jax.Array | None]
"""What is stored, of shapes (M, A) and then (M, B); sums of shape (B,) in float32; and the gradient
to the weight, (B, A) in float32, or None."""


def by_passes(around: Around, given: Operands) -> Made:
    """The product and what stands around it as XLA runs it, in passes over memory."""
    a, b = ([v[None, :] for v in vectors] for vectors in (given.vectors, given.result_vectors))
    operand, *extra = around.before(*given.rows, *a)
    kept = extra[: around.stored]
    product = jnp.matmul(operand, given.weight, preferred_element_type=jnp.float32)
    made = list(around.behind(product, *given.result_rows, *b))
    gradient = None
    if around.has_gradient:
        by = (((0,), (0,)), ((), ()))
        gradient = lax.dot_general(made.pop(0), operand, by, preferred_element_type=jnp.float32)
    stored, summed = made[: around.results], made[around.results :]
    return (*kept, *stored), tuple(x.astype(jnp.float32).sum(0) for x in summed), gradient


def in_tiles(around: Around, given: Operands, tiling: Tiling, interpret: bool = False) -> Made:
    """The same by one kernel, and the sum of what its programs sum.

    Args:
      interpret: whether it is interpreted, by JAX, on whatever device there is.

    Raises:
      ValueError: `tiling` does not divide the product.
    """
    from jax.experimental import pallas as pl

    rows, (a, b) = given.rows[0].shape[0], given.weight.shape
    tiles, programs = divided(tiling, rows, b, f"a product of {rows} rows and {b} columns")
    shapes = _results(around, given, programs)
    sizes = [
        len(x) for x in (given.rows, given.vectors, given.result_rows, given.result_vectors, (0,))
    ]
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    kept = around.stored + around.results
    summed = len(shapes) - kept - around.has_gradient

    def kernel(*refs: Any) -> None:
        wide, vectors, result_wide, result_vectors, [weight] = (
            refs[start:end] for start, end in itertools.pairwise(ends)
        )
        outputs = refs[ends[-1] :]
        first, block = pl.program_id(0), pl.program_id(1)
        columns = pl.ds(block * tiling.columns, tiling.columns)
        ahead = [ref[:][None, :] for ref in vectors]
        after = [ref[columns][None, :] for ref in result_vectors]
        w = weight[:, columns]

        def tile(i: Any, sums: Any) -> Any:
            here = pl.ds((first + i * programs) * tiling.rows, tiling.rows)
            operand, *extra = around.before(*(ref[here, :] for ref in wide), *ahead)
            product = _turned(w, operand, (0, 1)).T
            made = list(
                around.behind(product, *(ref[here, columns] for ref in result_wide), *after)
            )
            parts = []
            if around.has_gradient:
                parts = [_turned(made.pop(0), operand, (0, 0))]
            for ref, value in zip(outputs, extra[: around.stored], strict=False):
                ref[here, :] = value
            for ref, value in zip(
                outputs[around.stored : kept], made[: around.results], strict=True
            ):
                ref[here, columns] = value
            parts = [*(jnp.sum(x, 0) for x in made[around.results :]), *parts]
            return tuple(s + part for s, part in zip(sums, parts, strict=True))

        zeros = [jnp.zeros((tiling.columns,), jnp.float32)] * summed
        if around.has_gradient:
            zeros.append(jnp.zeros((tiling.columns, a), jnp.float32))
        count = (tiles - first + programs - 1) // programs
        sums = lax.fori_loop(0, count, tile, tuple(zeros))
        for ref, value in zip(outputs[kept:], sums, strict=True):
            if value.ndim == 1:
                ref[first, columns] = value
            else:
                ref[first, columns, :] = value

    found = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(programs, b // tiling.columns),
        interpret=interpret,
        **({} if interpret else compat.triton_params(tiling.warps, tiling.stages)),
    )(*given.arrays)
    sums = [x.sum(0) for x in found[kept:]]
    gradient = sums.pop() if around.has_gradient else None
    return tuple(found[:kept]), tuple(sums), gradient


def _turned(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    by = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(x, y, by, preferred_element_type=jnp.float32)


def _results(around: Around, given: Operands, programs: int) -> list[jax.ShapeDtypeStruct]:
    """The types of what the kernel returns; sums come from each program."""
    rows, (a, b) = given.rows[0].shape[0], given.weight.shape
    one = lambda x: jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype)
    before = jax.eval_shape(around.before, *map(one, (*given.rows, *given.vectors)))
    behind = jax.eval_shape(
        around.behind,
        jax.ShapeDtypeStruct((1, b), jnp.float32),
        *map(one, (*given.result_rows, *given.result_vectors)),
    )
    start = 1 if around.has_gradient else 0
    end = start + around.results
    shapes = [jax.ShapeDtypeStruct((rows, a), x.dtype) for x in before[1 : 1 + around.stored]]
    shapes += [jax.ShapeDtypeStruct((rows, b), x.dtype) for x in behind[start:end]]
    shapes += [jax.ShapeDtypeStruct((programs, b), jnp.float32)] * len(behind[end:])
    if around.has_gradient:
        shapes.append(jax.ShapeDtypeStruct((programs, b, a), jnp.float32))
    return shapes
