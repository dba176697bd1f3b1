"""pooled: max-pools and their gradients by tiles, with the values of passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from vmem_jax.capture import overlap
from vmem_jax.conv.pooled import (
    Spread,
    Tiling,
    Windows,
    pooled_in_tiles,
    spread_in_tiles,
    tiling_of,
)

BATCH, CHANNELS = 4, 32
TILING = Tiling(rows=4, columns=16, warps=4)
WINDOWS = {
    "same": Windows(12, 16, (3, 3), (2, 2), ((0, 1), (0, 1))),
    "padded on both sides": Windows(12, 16, (3, 3), (2, 2), ((1, 1), (1, 1))),
    "valid": Windows(12, 16, (3, 3), (2, 2), ((0, 0), (0, 0))),
    "a stride of one": Windows(8, 12, (3, 2), (1, 2), ((1, 1), (0, 1))),
    "several strides wide": Windows(12, 16, (5, 1), (2, 1), ((2, 2), (0, 0))),
}


def _draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def _flat(x):
    return x.reshape(-1, x.shape[-1])


def _made(x, factor):
    return [jnp.maximum(x.astype(jnp.float32) * factor, -1).astype(x.dtype)]


def _case(windows, dtype):
    """What is pooled, with ties, NaN and infinities, its factor, and the gradient to the result."""
    x = jnp.round(2 * _draw(0, BATCH, windows.height, windows.width, CHANNELS))
    x = x.at[0, 3, 3, :4].set(jnp.nan).at[0, 4, 3, 2].set(-jnp.inf).at[1, 0, 0].set(jnp.inf)
    grad = _draw(1, BATCH, *windows.pooled, CHANNELS).astype(dtype)
    return x.astype(dtype), jnp.full(CHANNELS, 0.5), grad


def _by_passes(windows, x, factor, grad):
    [y] = _made(x, factor)
    size, strides, padding = windows.whole
    index = overlap.window_index(size, strides, padding, y)
    pooled = lax.reduce_window(y, -jnp.inf, lax.max, size, strides, padding)
    return pooled, index, overlap.scatter(size, strides, padding, x.shape, grad, index)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in WINDOWS), ("same", "bfloat16")]
)
def test_tiles_have_the_values_of_passes(name, dtype):
    windows = WINDOWS[name]
    x, factor, grad = _case(windows, dtype)
    pooled, index = pooled_in_tiles(_made, windows, [_flat(x)], [factor], TILING, interpret=True)
    spread = spread_in_tiles(windows, _flat(grad), index, TILING, interpret=True)
    expected = map(_flat, _by_passes(windows, x, factor, grad))
    for mine, theirs in zip((pooled, index, spread), expected, strict=True):
        assert mine.dtype == theirs.dtype
        a, b = (np.asarray(x, np.float32) for x in (mine, theirs))
        np.testing.assert_array_equal(a, b)
        if mine is spread:  # of zeros in a window the first is the largest
            np.testing.assert_array_equal(np.signbit(a[a == 0]), np.signbit(b[a == 0]))


def test_tiles_that_do_not_divide_are_refused():
    windows, tiling = WINDOWS["valid"], Tiling(rows=128, columns=16, warps=4)
    x, factor, grad = _case(windows, "float16")
    with pytest.raises(ValueError, match="do not divide 140 rows of 32 channels"):
        pooled_in_tiles(_made, windows, [_flat(x)], [factor], tiling)
    with pytest.raises(ValueError, match="do not divide 192 groups"):
        spread_in_tiles(windows, _flat(grad), _flat(grad), tiling)


@pytest.mark.parametrize(
    ("side", "channels"), [(112, 64), (56, 192), (55, 96), (27, 256), (147, 64), (71, 192)]
)
def test_the_images_of_networks_have_tilings(side, channels):
    windows = Windows(side, side, (3, 3), (2, 2), ((0, side % 2 == 0),) * 2)
    pixels, made = 256 * side**2, 256 * windows.pooled[0] ** 2
    spread = Spread(windows, (256, side, side, channels))
    groups = 256 * windows.groups[0] ** 2
    for tiling, rows in ((tiling_of(made, channels, pixels), made), (spread.tiling, groups)):
        assert tiling is not None
        assert not rows % tiling.rows and not channels % tiling.columns
        assert tiling.rows * tiling.columns in (256, 512)


@pytest.mark.parametrize(("rows", "channels"), [(25_088, 24), (25_089, 16), (2**27, 64)])
def test_arrays_that_no_tile_divides_or_that_are_too_large_have_none(rows, channels):
    assert tiling_of(rows, channels, rows) is None


@pytest.mark.gpu_compile
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend")
@pytest.mark.parametrize("side", [112, 55])
def test_kernels_compile(side):
    """Those of 55 pixels store under a mask."""
    from vmem_jax.devices.targets import target
    from vmem_jax.jax_compat import on_described_gpu

    channels = 64
    windows = Windows(side, side, (3, 3), (2, 2), ((0, side % 2 == 0),) * 2)
    sharding = target("h200").sharding()
    make = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    pixels, rows = 256 * side**2, 256 * windows.pooled[0] ** 2
    tiling, spread = tiling_of(rows, channels, pixels), Spread(windows, (256, side, side, channels))
    assert tiling is not None and spread.tiling is not None
    with on_described_gpu("NVIDIA H200"):
        pool = jax.jit(lambda x, factor: pooled_in_tiles(_made, windows, [x], [factor], tiling))
        x, factor = make((pixels, channels), "float16"), make((channels,), "float32")
        back = jax.jit(lambda g, i: spread_in_tiles(windows, g, i, spread.tiling))
        given = [make((rows, channels), dtype) for dtype in ("float16", "uint8")]
        compiled = pool.lower(x, factor).compile(), back.lower(*given).compile()
    for each in compiled:
        assert each.as_text().count("gpu.triton") == 1
        assert each.memory_analysis().temp_size_in_bytes == 0
