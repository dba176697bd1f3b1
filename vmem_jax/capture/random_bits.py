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
from jax.extend import core as jexc
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

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


part_p = jexc.Primitive("random_part")
"""u32[2], i32[] -> the bits of some samples, of a key's words and the first of these samples.

Its parameters are those of the `random_bits` of all samples, and `layout`, `whole` and `size` as
`sliced_bits` has them.
"""


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
    given = {name: eqn.params[name] for name in ("shape", "bit_width")}
    words = jax.random.key_data(key)
    made: jax.Array = part_p.bind(words, offset, layout=layout, whole=whole, size=size, **given)
    return made


def _part(
    words: jax.Array,
    offset: jax.Array,
    *,
    shape: tuple[int, ...],
    bit_width: int,
    layout: Layout,
    whole: int,
    size: int,
) -> jax.Array:
    before = math.prod(shape[: layout.dim]) * layout.outer
    after = layout.inner * math.prod(shape[layout.dim + 1 :])
    at = lambda dim: lax.broadcasted_iota(jnp.uint32, (before, size, after), dim)
    sample = at(1) + offset.astype(jnp.uint32)
    position = (at(0) * jnp.uint32(whole) + sample) * jnp.uint32(after) + at(2)
    return bits_at(words, position.reshape(layout.shape(shape, size)), bit_width)


def bits_at(words: jax.Array, position: jax.Array, bit_width: int = 32) -> jax.Array:
    """The bits that a key of these two words has at positions, u32."""
    first, second = words
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(position), position)
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return lax.shift_left(high.astype(dtype), jnp.asarray(32, dtype)) | low.astype(dtype)
    return (high ^ low).astype(dtype)


@part_p.def_abstract_eval
def _abstract(words: Any, offset: Any, **params: Any) -> Any:
    del offset
    shape = params["layout"].shape(params["shape"], params["size"])
    return words.update(shape=shape, dtype=jnp.dtype(f"uint{params['bit_width']}"))


part_p.def_impl(_part)
mlir.register_lowering(part_p, mlir.lower_fun(_part, multiple_results=False))
