"""pooled: the kernels of max-pools on a GPU, with the values of XLA's passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from vmem_jax.capture import overlap
from vmem_jax.conv.pooled import (
    Spread,
    Windows,
    pooled_in_tiles,
    spread_in_tiles,
    tiling_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend"),
]

BATCH, CHANNELS = 32, 64


def _made(x, factor):
    y = (x.astype(jnp.float32) * factor).astype(x.dtype)
    return [jnp.where(y <= 0, jnp.zeros_like(y), y)]  # keeps NaN, which Triton's maximum does not


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("side", "low"), [(56, 0), (56, 1), (55, 0), (55, 1), (28, 0)])
def test_kernels_have_the_values_of_passes(side, low, dtype):
    """Of odd sizes the last group of pixels is stored in part."""
    windows = Windows(side, side, (3, 3), (2, 2), ((low, 1),) * 2)
    x = jax.random.normal(jax.random.key(0), (BATCH, side, side, CHANNELS)).astype(dtype)
    x = x.at[0, 3, 3, :4].set(jnp.nan).at[1, 0, 0].set(jnp.inf)
    factor = jnp.linspace(0.5, 2, CHANNELS)
    grad = jax.random.normal(jax.random.key(1), (BATCH, *windows.pooled, CHANNELS)).astype(dtype)
    rows = grad.size // CHANNELS
    tiling = tiling_of(rows, CHANNELS, BATCH * side**2)
    spread = Spread(windows, x.shape).tiling
    assert tiling is not None and spread is not None
    flat = lambda a: a.reshape(-1, CHANNELS)

    @jax.jit
    def kernels(x, factor, grad):
        pooled, index = pooled_in_tiles(_made, windows, [flat(x)], [factor], tiling)
        return pooled, index, spread_in_tiles(windows, flat(grad), index, spread)

    @jax.jit
    def passes(x, factor, grad):
        y = lax.optimization_barrier(_made(flat(x), factor))[0].reshape(x.shape)
        index = overlap.window_index(*windows.whole, y)
        size, strides, padding = windows.whole
        pooled = lax.reduce_window(y, -jnp.inf, lax.max, size, strides, padding)
        gradient = overlap.scatter(*windows.whole, x.shape, grad, index)
        return flat(pooled), flat(index), flat(gradient)

    for mine, theirs in zip(kernels(x, factor, grad), passes(x, factor, grad), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (mine, theirs))
        np.testing.assert_array_equal(a, b)
