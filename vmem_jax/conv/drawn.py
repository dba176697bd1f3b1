"""drawn: the bits of a mask that random words make, as one kernel, a JAX primitive.

Threefry takes 20 rounds for a word, each an addition, a rotation and an exclusive or (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). A multiprocessor of an H100 or an H200 adds
integers in the same unit as it rotates, and multiplies them in another. Here one kernel, in Pallas
for Triton, adds by multiplying with one. On an H200 it takes 0.72 to 0.87 of what XLA's kernels take
(`benchmarks/masks.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jexc

from vmem_jax import jax_compat as compat
from vmem_jax.capture.bits import BITS, pack_p
from vmem_jax.capture.random_bits import bits_at
from vmem_jax.conv.triton import register

drawn_mask_p = jexc.Primitive("drawn_mask")
drawn_mask_p.multiple_results = True
"""u32[2], i32[] -> the bytes of a mask, of a key's words and the first of its samples."""


@dataclasses.dataclass(frozen=True)
class DrawnMask:
    """A mask of random words, eight in a byte.

    Attributes:
      shape: of the words.
      strides: how far positions of neighbours along each dimension lie apart.
      step: how far those of two samples do.
      threshold: the mask is true where words are less.
      padded: the shape of the mask, which is false where there are no words.
      axis: along which it is packed; words are not padded along it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    step: int
    threshold: int
    padded: tuple[int, ...]
    axis: int

    @property
    def packed(self) -> tuple[int, ...]:
        """The shape of the bytes."""
        return tuple(n // BITS if d == self.axis else n for d, n in enumerate(self.padded))

    @property
    def dimensions(self) -> list[tuple[int, int, int]]:
        """(bytes, those with words, positions from one to the next) along each dimension of the
        bytes, as few as there can be."""
        found: list[tuple[int, int, int]] = []
        for d, size in enumerate(self.packed):
            apart = self.strides[d] * (BITS if d == self.axis else 1)
            own = size if d == self.axis else self.shape[d]
            if found and own == size:
                outer, those, step = found[-1]
                if step == apart * size:
                    found[-1] = outer * size, those * size, apart
                    continue
            found.append((size, own, apart))
        return found


@drawn_mask_p.def_abstract_eval
def _abstract(words: Any, offset: Any, *, drawn: DrawnMask) -> list[Any]:
    del words, offset
    return [jax.core.ShapedArray(drawn.packed, jnp.dtype("uint8"))]


def by_passes(words: jax.Array, offset: jax.Array, *, drawn: DrawnMask) -> list[jax.Array]:
    """The bytes as XLA makes them."""
    position = offset.astype(jnp.uint32) * jnp.uint32(drawn.step)
    for d, stride in enumerate(drawn.strides):
        at = lax.broadcasted_iota(jnp.uint32, drawn.shape, d)
        position = position + at * jnp.uint32(stride)
    mask = bits_at(words, position) < jnp.uint32(drawn.threshold)
    behind = [(0, n - own) for n, own in zip(drawn.padded, drawn.shape, strict=True)]
    return [pack_p.bind(jnp.pad(mask, behind), axis=drawn.axis)]


_BYTES = 512
"""Of a program: four to each thread of its warps. With 1,024 it takes 1.13 times as long."""
_WARPS = 4


def in_tiles(
    words: jax.Array, offset: jax.Array, *, drawn: DrawnMask, interpret: bool = False
) -> list[jax.Array]:
    """The same by one kernel.

    Args:
      interpret: whether it is interpreted, by JAX, on whatever device there is.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    total = math.prod(drawn.packed)

    def kernel(words_ref: Any, offset_ref: Any, one_ref: Any, out: Any) -> None:
        one = jnp.full(_BYTES, one_ref[0], jnp.uint32)
        integers = _Integers() if interpret else _IntegersOfBothUnits(compat.triton_assembly, one)
        first = pl.program_id(0) * _BYTES
        places = first + jnp.arange(_BYTES, dtype=jnp.int32)
        start = offset_ref[0].astype(jnp.uint32) * jnp.uint32(drawn.step)
        position, inside = _positions(drawn, places.astype(jnp.uint32), start)
        key = words_ref[0], words_ref[1]
        made = jnp.zeros(_BYTES, jnp.uint32)
        for bit in range(BITS):
            apart = jnp.uint32(bit * drawn.strides[drawn.axis])
            is_less = _word(key, position + apart, integers) < jnp.uint32(drawn.threshold)
            made = made | jnp.where(is_less, jnp.uint32(1 << bit), jnp.uint32(0))
        made = jnp.where(inside, made, jnp.uint32(0)).astype(jnp.uint8)
        triton.store(out.at[pl.ds(first, _BYTES)], made, mask=places < total)

    made = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((total,), jnp.dtype("uint8")),
        grid=(-(-total // _BYTES),),
        interpret=interpret,
        **({} if interpret else compat.triton_params(_WARPS, 1)),
    )(words, offset.reshape(1), jnp.ones(1, jnp.uint32))
    return [made.reshape(drawn.packed)]


def _positions(
    drawn: DrawnMask, places: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The position of the first word of each byte, and whether there is one."""
    position = jnp.full(places.shape, start, jnp.uint32)
    inside = places >= jnp.uint32(0)
    for size, own, apart in reversed(drawn.dimensions):
        at = places % jnp.uint32(size)
        places = places // jnp.uint32(size)
        position = position + at * jnp.uint32(apart)
        if own < size:
            inside = inside & (at < jnp.uint32(own))
    return position, inside


class _Integers:
    """Operations of 32 bits."""

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return a + b

    def rotated(self, a: jax.Array, by: int, other: jax.Array) -> jax.Array:
        """`a` with its bits moved up by so many, those of the top to the bottom, exclusively or
        `other`."""
        return ((a << jnp.uint32(by)) | (a >> jnp.uint32(32 - by))) ^ other

    def rotated_otherwise(self, a: jax.Array, by: int, other: jax.Array) -> jax.Array:
        """The same in another unit, if there is one."""
        return self.rotated(a, by, other)


class _IntegersOfBothUnits(_Integers):
    """The same, with additions by the unit that multiplies.

    Args:
      assembly: (template, operands) -> u32 of their shape.
      one: ones that are read from memory: an assembler turns multiplications with numbers that it
        knows back.
    """

    def __init__(
        self, assembly: Callable[[str, Sequence[jax.Array]], jax.Array], one: jax.Array
    ) -> None:
        self.assembly, self.one = assembly, one

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.assembly("mad.lo.u32 $0, $1, $2, $3;", [a, self.one, b])

    def rotated_otherwise(self, a: jax.Array, by: int, other: jax.Array) -> jax.Array:
        """Both halves of `a` times a power of two, or, exclusively, `other`: one operation (0x56)."""
        return self.assembly(
            "{.reg .u32 low, high; .reg .u64 wide; mul.wide.u32 wide, $1, $2; "
            "mov.b64 {low, high}, wide; lop3.b32 $0, low, high, $3, 0x56;}",
            [a, self.one << jnp.uint32(by), other],
        )


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
"""Of Threefry: the rounds' rotations, and what the third word of a key is made with."""
_OTHERWISE = (5, 10, 15)
"""Rounds that rotate by multiplying. With three such rounds 40 million words take 114 us on an H200,
with none 131, with five 117."""


def _word(key: Sequence[jax.Array], position: jax.Array, integers: _Integers) -> jax.Array:
    """The 32 bits at each position."""
    full = lambda x: jnp.full(position.shape, x, jnp.uint32)
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    high, low = full(keys[0]), position + keys[1]
    for turn in range(5):
        for n, by in enumerate(_ROTATIONS[turn % 2]):
            high = integers.add(high, low)
            otherwise = 4 * turn + n in _OTHERWISE
            rotate = integers.rotated_otherwise if otherwise else integers.rotated
            low = rotate(low, by, high)
        high = integers.add(high, full(keys[(turn + 1) % 3]))
        low = integers.add(low, full(keys[(turn + 2) % 3] + jnp.uint32(turn + 1)))
    return high ^ low


register(drawn_mask_p, by_passes, in_tiles)
