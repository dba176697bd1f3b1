"""scratch: device memory to time cuDNN's plans in."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from vmem_jax.conv.slices import layouts, roles
from vmem_jax.core.convolution import Convolution, Epilogue

_ALIGNMENT = 256
"""Elements that memory for operands begins at multiples of: more than cuDNN asks of any buffer."""

_CACHES = 256 << 20
"""Bytes that no GPU's cache holds: an H200's has 50 MB, a B200's 126. A micro-batch that finds its
operands there runs faster than one in a step."""

Addresses = tuple[int, ...]
"""Of x, w, y, the workspace and the bias; for a convolution that has any of them also of scale and
bias of the prologue, and of both sums. 0 where there is none."""


class Scratch:
    """Device memory to time plans in: random values to read, and bytes to write. It only grows.

    It is JAX's, so it comes out of what that has reserved. Plans share it, because random values of
    another shape would each time be another program to compile, which takes longer than most plans.
    """

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._values: dict[str, jax.Array] = {}
        self._bytes: jax.Array | None = None

    def sets(self, convolution: Convolution, workspace: int, most: int) -> list[Addresses]:
        """Sets of buffers: as many as are together larger than any cache, but at most `most`.

        Each begins where a second micro-batch's would, one sample behind what is aligned (w: one w):
        cuDNN has engines that fail there. The result's are bytes to write. The workspace is the same
        in all; the bias is what begins w, and scale and bias of a prologue are what begins x.
        """
        shapes, itemsize = layouts(convolution), jnp.dtype(convolution.dtype).itemsize
        *operands, result = roles(convolution.which)
        behind = {role: math.prod(shapes[role][role != "w" :]) for role in shapes}
        sizes = {r: _rounded(math.prod(shapes[r]) + behind[r], _ALIGNMENT) for r in shapes}
        count = min(most, -(-_CACHES // (sum(sizes.values()) * itemsize)))
        first, second = operands
        read, made = sizes[first] + sizes[second], sizes[result] * itemsize
        sums = convolution.epilogue == Epilogue.SUMS
        one = 4 * _rounded(convolution.features_out, _ALIGNMENT) * sums  # bytes, of float32
        each = made + 2 * one
        values = self._drawn(count * read, convolution.dtype).unsafe_buffer_pointer()
        written = self._written(count * each + workspace).unsafe_buffer_pointer()
        found = []
        for i in range(count):
            at = {first: values + i * read * itemsize, result: written + i * each}
            at[second] = at[first] + sizes[first] * itemsize
            at = {role: address + behind[role] * itemsize for role, address in at.items()}
            bias = at["w"] if convolution.epilogue and not sums else 0
            more: list[int] = []
            if convolution.prologue or sums:
                scale = at["x"] if convolution.prologue else 0
                shift = scale and scale + convolution.features_in * itemsize
                total = (written + i * each + made) * sums
                more = [scale, shift, total, total and total + one]
            found.append((at["x"], at["w"], at["y"], written + count * each, bias, *more))
        return found

    def _drawn(self, count: int, dtype: str) -> jax.Array:
        if dtype not in self._values or self._values[dtype].size < count:
            self._values.pop(dtype, None)  # first, lest both be there
            with jax.default_device(self._device):
                key = jax.random.key(0)
                self._values[dtype] = jax.random.normal(key, (_eighths(count),), dtype)
            self._values[dtype].block_until_ready()
        return self._values[dtype]

    def _written(self, nbytes: int) -> jax.Array:
        if self._bytes is None or self._bytes.size < nbytes:
            self._bytes = None
            with jax.default_device(self._device):
                self._bytes = jnp.zeros(_eighths(nbytes), jnp.uint8)
            self._bytes.block_until_ready()  # before cuDNN, which overwrites it
        return self._bytes


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _eighths(number: int) -> int:
    """At least `number`, of few different ones: a multiple of an eighth of a power of two."""
    return _rounded(max(number, 1), max(1, 1 << max(number.bit_length() - 4, 0)))
