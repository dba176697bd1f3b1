"""scratch: device memory to time cuDNN's plans in."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from vmem_jax.conv.slices import layouts, roles
from vmem_jax.core.convolution import Convolution

_ALIGNMENT = 256
"""Elements that operands begin at multiples of: more than cuDNN asks of any buffer."""


class Scratch:
    """Device memory to time plans in: random values to read, and bytes to write. It only grows.

    It is JAX's, so it comes out of what that has reserved. Plans share it, because random values of
    another shape would each time be another program to compile, which takes longer than most plans.
    """

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._values: dict[str, jax.Array] = {}
        self._bytes: jax.Array | None = None

    def buffers(self, convolution: Convolution, workspace: int) -> tuple[int, int, int, int]:
        """The addresses of x, w, y and the workspace; the result's is that of bytes to write."""
        shapes, itemsize = layouts(convolution), jnp.dtype(convolution.dtype).itemsize
        *operands, result = roles(convolution.which)
        sizes = {role: _rounded(math.prod(shapes[role]), _ALIGNMENT) for role in shapes}
        values = self._drawn(sum(sizes[role] for role in operands), convolution.dtype)
        at = dict(zip(operands, (0, sizes[operands[0]]), strict=True))
        made = sizes[result] * itemsize
        written = self._written(made + workspace).unsafe_buffer_pointer()
        drawn = values.unsafe_buffer_pointer()
        found = {role: drawn + at[role] * itemsize for role in operands} | {result: written}
        return found["x"], found["w"], found["y"], written + made

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
