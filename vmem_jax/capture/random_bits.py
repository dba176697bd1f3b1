"""random_bits: the random bits of some samples alone, as those of the whole batch have them.

A threefry generator makes every word of its key and of the word's position in the array: with JAX's
partitionable ones no word needs another. (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
SC 2011, section 2.)
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from vmem_jax.capture.layouts import Layout
from vmem_jax.jax_compat import JaxprEqn


def can_slice(eqn: JaxprEqn) -> bool:
    """Whether the words of `eqn`, a `random_bits` of one key, can be made one by one."""
    config: Any = jax.config
    key: Any = eqn.invars[0].aval
    return (
        config.jax_threefry_partitionable
        and not key.shape
        and str(key.dtype) == "key<fry>"
        and math.prod(eqn.params["shape"]) < 2**32  # positions of one word
    )


def sliced_bits(
    eqn: JaxprEqn, key: jax.Array, offset: jax.Array, layout: Layout, whole: int, size: int
) -> jax.Array:
    """The bits of `size` samples.

    Args:
      eqn: the `random_bits` of all samples.
      key: its key.
      offset: the first of the samples, i32[].
      layout: how the samples lie in its result.
      whole: how many there are.
    """
    shape, width = eqn.params["shape"], eqn.params["bit_width"]
    before = math.prod(shape[: layout.dim]) * layout.outer
    after = layout.inner * math.prod(shape[layout.dim + 1 :])
    at = lambda dim: lax.broadcasted_iota(jnp.uint32, (before, size, after), dim)
    sample = at(1) + offset.astype(jnp.uint32)
    position = (at(0) * jnp.uint32(whole) + sample) * jnp.uint32(after) + at(2)
    position = position.reshape(layout.shape(shape, size))
    first, second = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(position), position)
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        return lax.shift_left(high.astype(dtype), jnp.asarray(32, dtype)) | low.astype(dtype)
    return (high ^ low).astype(dtype)
