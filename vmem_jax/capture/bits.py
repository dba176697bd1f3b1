"""bits: eight booleans in a byte, as two JAX primitives.

Along one axis of a mask each eight neighbours become one byte, the first its lowest bit. Both
directions are elementwise loops for XLA, over rows of the dimensions behind that axis: packing reads
eight of them for each that it writes, and what reads the mask again takes its bit out of the byte.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jexc
from jax.interpreters import mlir

BITS = 8
"""Of a byte."""

pack_p = jexc.Primitive("pack_bits")
"""bool[..., d, ...] -> u8[..., d / 8, ...], with d the dimension `axis`."""

unpack_p = jexc.Primitive("unpack_bits")
"""u8[..., d / 8, ...] -> bool[..., d, ...], of what `pack_p` gives the same."""


def packed_aval(aval: Any, axis: int) -> Any:
    """The type of the bytes of a mask of type `aval`."""
    return aval.update(shape=_resized(aval.shape, axis, aval.shape[axis] // BITS), dtype="uint8")


def _unpacked_aval(aval: Any, axis: int) -> Any:
    return aval.update(shape=_resized(aval.shape, axis, aval.shape[axis] * BITS), dtype="bool")


def _resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _pack(mask: jax.Array, *, axis: int) -> jax.Array:
    size, shape = mask.shape[axis] // BITS, mask.shape
    x = mask.astype(jnp.uint8).reshape(*shape[:axis], size, BITS, *shape[axis + 1 :])
    for half in (4, 2, 1):
        low = lax.slice_in_dim(x, 0, half, axis=axis + 1)
        high = lax.slice_in_dim(x, half, 2 * half, axis=axis + 1)
        x = low | (high << jnp.uint8(half))
    return x.reshape(_resized(shape, axis, size))


def _unpack(packed: jax.Array, *, axis: int) -> jax.Array:
    shape = (*packed.shape[: axis + 1], BITS, *packed.shape[axis + 1 :])
    x = lax.broadcast_in_dim(packed, shape, [d for d in range(len(shape)) if d != axis + 1])
    bit = lax.broadcasted_iota(jnp.uint8, shape, axis + 1)
    mask = (x >> bit) & jnp.uint8(1) != jnp.uint8(0)
    return mask.reshape(_resized(packed.shape, axis, packed.shape[axis] * BITS))


pack_p.def_abstract_eval(packed_aval)
unpack_p.def_abstract_eval(_unpacked_aval)
mlir.register_lowering(pack_p, mlir.lower_fun(_pack, multiple_results=False))
mlir.register_lowering(unpack_p, mlir.lower_fun(_unpack, multiple_results=False))
