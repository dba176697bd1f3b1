"""small_tables: gradients to tables of few rows, made by products.

The gradient to a table that is read by indices is added up row by row (`scatter-add`). XLA:GPU adds
with atomics, and where many updates are of few rows these wait for each other, longest in 16 bits:
for 16,384 tokens of two types, 768 values each, an H200 takes 73 ms in bfloat16, and 0.39 for the
biases of 512 x 512 relative positions, of which there are 32, of 12 heads in float32. The product of
the updates with the indices as one-hot rows takes 0.03 and 0.06 ms (`benchmarks/few_rows.py`). It
adds up in float32, and always in the same order. Where an update is infinite or NaN every row becomes
NaN, not only its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.def_use import makers
from vmem_jax.capture.editor import constant, spliced, with_each_replaced
from vmem_jax.capture.primitives import shape_of
from vmem_jax.capture.transposed_convolutions import Spreading
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var

_LEAST_UPDATES = {4: 2**20, 2: 2**16}
"""Elements that are added at least, by the bytes of one: fewer take as long as it takes to start
kernels. In 16 bits each update of a row takes 8 to 9 µs, however many columns there are."""

_MOST_ROWS = {4: 32, 2: 512}
"""Rows of the largest table whose product was measured to be faster, by the bytes of an element. With
512 rows float32 takes 0.34 ms instead of 0.06."""

_LEAST_OF_ROW = {4: 512, 2: 32}
"""Updates of a row, by the bytes of an element, from which the product was measured to be faster."""

_LEAST_SUMMED = 256
"""Indices along the last dimension from which sums of it alone are made first."""

_MOST_WIDER = 4
"""How many times as many elements as the updates the one-hot rows have at most."""

_TIMES = {4: 2, 2: 1 / 4}
"""What the atomics take of the product's time, in 16 bits for each update of a row: in float32 1.1 to
2.9 times as long, 6 where updates are not spread evenly; in bfloat16 2,670 times with 8,192 updates
of a row, 114 with 512."""


def with_known_tables(
    flat: ClosedJaxpr, platform: str, shardings: Sequence[Any]
) -> tuple[ClosedJaxpr, Spreading]:
    """`flat`, in which no gradient to a table of few rows is added by atomics, and how many times as
    long as in it these products take as they were written.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
      shardings: of its inputs; only where all are on one device something changes.
    """
    if platform != "gpu" or any(s is not None and s.num_devices > 1 for s in shardings):
        return flat, {}
    found: dict[Var, int] = {}
    return with_each_replaced(flat, functools.partial(_rule, found)), found


def _rule(found: dict[Var, int], closed: ClosedJaxpr) -> Any:
    eqns = compat.open_jaxpr(closed).eqns
    made = makers(eqns)
    source = lambda a: eqns[made[a]] if a in made else None

    def replaced(eqn: JaxprEqn) -> list[JaxprEqn]:
        if not _adds_up(eqn) or constant(eqn.invars[0], source) != 0:
            return [eqn]
        table, indices, updates = eqn.invars
        aval: Any = table.aval
        rows, size = aval.shape[0], aval.dtype.itemsize
        clips = eqn.params["mode"] == lax.GatherScatterMode.CLIP
        product = functools.partial(_product, rows=rows, clips=clips)
        products, _ = spliced(product, [indices, updates], eqn, eqn.outvars[0])
        of_row = math.prod(shape_of(indices)) // rows
        times = max(1, int(_TIMES[size] * (of_row if size == 2 else 1)))
        dots = (e for e in products if e.primitive.name == "dot_general")
        found.update((v, times) for e in dots for v in e.outvars)
        return products

    return replaced


def _adds_up(eqn: JaxprEqn) -> bool:
    """Whether `eqn` adds rows of numbers to those of a table of few rows, at indices of its rows."""
    if eqn.primitive.name not in ("scatter-add", "scatter_add") or eqn.params["unique_indices"]:
        return False
    table, indices, updates = eqn.invars
    numbers, shape = eqn.params["dimension_numbers"], shape_of(updates)
    aval: Any = table.aval
    places, size = shape_of(indices)[:-1], aval.dtype.itemsize
    if size not in _MOST_ROWS or not jnp.issubdtype(aval.dtype, jnp.floating) or not places:
        return False
    along, rows = len(places), aval.shape[0]
    is_of_rows = (
        numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
        and numbers.update_window_dims == tuple(range(along, len(shape)))
        and not numbers.operand_batching_dims
        and shape == (*places, *aval.shape[1:])
    )
    if not is_of_rows or not rows or (size == 4 and not _has_parts(places)):
        return False
    of_row, columns = math.prod(places) // rows, math.prod(shape[along:])
    return (
        math.prod(shape) >= _LEAST_UPDATES[size]
        and rows <= min(_MOST_ROWS[size], _MOST_WIDER * columns)
        and of_row >= _LEAST_OF_ROW[size]
    )


def _product(indices: jax.Array, updates: jax.Array, rows: int, clips: bool) -> jax.Array:
    """The table of `rows` to which `updates` are added, (..., *columns), at `indices`, (..., 1)."""
    index = indices[..., 0]
    columns = updates.shape[index.ndim :]
    along = index.ndim
    if clips:
        index = jnp.clip(index, 0, rows - 1)
    wide = jnp.promote_types(index.dtype, jnp.int32)  # has every row, as that of `index` may not
    one_hot = (index.astype(wide)[..., None] == jnp.arange(rows, dtype=wide)).astype(updates.dtype)
    kept = along - 1 if _has_parts(index.shape) else 0
    summed, beside = tuple(range(kept, along)), tuple(range(kept))
    parts = lax.dot_general(
        one_hot,
        updates.reshape(*index.shape, -1),
        ((summed, summed), (beside, beside)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return parts.sum(beside).astype(updates.dtype).reshape(rows, *columns)


def _has_parts(places: tuple[int, ...]) -> bool:
    """Whether indices of this shape are summed along their last dimension first."""
    return len(places) > 1 and places[-1] >= _LEAST_SUMMED
