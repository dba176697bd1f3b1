"""density: what share of a value is not zero, on the arguments of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.capture import Captured
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.core.need import need_nbytes
from vmem_jax.errors import show_nbytes


def densities(
    captured: Captured,
    buffers: Sequence[int],
    leaves: Sequence[jax.Array],
    limit: int | None,
    slices: Sequence[int] = (),
) -> dict[int, float] | str:
    """The density of each of `buffers` when the step runs on `leaves`, from 0 to 1, of a stack that
    of its densest slice; or why they cannot be known.

    What makes them is compiled and run once, outside of the step, and gives nothing but the counts.

    Args:
      limit: bytes of device memory that it may need.
      slices: of each buffer; () for one of each.
    """
    opened = compat.open_jaxpr(captured.flat)
    wanted = [captured.variables[b] for b in buffers]
    parts = (opened.constvars, compat.constants(captured.flat), opened.invars, wanted, opened.eqns)
    values = jaxpr_as_fun(drop_dead(compat.close(*parts, like=captured.flat)))
    slices = slices or [1] * len(buffers)
    counts = jax.jit(lambda *leaves: list(map(_density, values(*leaves), slices)), keep_unused=True)
    compiled = compat.lower(counts, *leaves).compile()
    need = need_nbytes(compiled)
    if limit is not None and need > limit:
        return (
            f"counting the zeros of its residuals takes {show_nbytes(need)}, and the budget is "
            f"{show_nbytes(limit)}"
        )
    return dict(zip(buffers, map(float, compiled(*leaves)), strict=True))


def _density(x: jax.Array, slices: int) -> Any:
    """The share of the elements of `x` of which not all bits are zero: −0 is no zero here. Of its
    `slices` along the first axis the largest."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jnp.mean((bits != 0).reshape(slices, -1), axis=1, dtype=jnp.float32).max()
