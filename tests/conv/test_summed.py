"""summed: sums over rows of a batch norm's backward pass, by tiles and by passes, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vmem_jax.conv.summed import Tiling, by_passes, in_tiles, tiling_of

f32 = jnp.float32
TILING = Tiling(rows=32, columns=16, programs=3, warps=4)
ROWS, CHANNELS = 7 * TILING.rows, 48  # three programs take three, two and two tiles


def _normal(seed, shape, dtype=f32):
    return jax.random.normal(jax.random.key(seed), shape, f32).astype(dtype)


def _backward(dtype):
    """The gradient behind a ReLU, and its sums."""

    def make(g, y, mean, factor):
        centred = y.astype(f32) - mean
        dy = jnp.where(centred * factor > 0, g, jnp.zeros_like(g))
        return dy, dy.astype(f32), centred * dy.astype(f32), -(dy.astype(f32) * factor)

    return make


def _in_float64(g, y, mean, factor):
    dy = np.where((y - mean) * factor > 0, g, 0)
    return dy, dy.sum(0), ((y - mean) * dy).sum(0), -(dy * factor).sum(0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("stored", [0, 1])
def test_tiles_are_as_near_to_float64_as_passes(dtype, stored):
    rows = [_normal(0, (ROWS, CHANNELS), dtype), _normal(1, (ROWS, CHANNELS), dtype)]
    vectors = [0.1 * _normal(2, (CHANNELS,)), 1 + 0.1 * _normal(3, (CHANNELS,))]
    make = lambda *arrays: _backward(dtype)(*arrays)[1 - stored :]
    tiles = jax.jit(lambda *given: in_tiles(make, stored, *given, TILING, interpret=True))
    passes = jax.jit(lambda *given: by_passes(make, stored, *given))
    exact = [np.asarray(x, np.float64) for x in (*rows, *vectors)]
    expected = _in_float64(*exact)[1 - stored :]
    ours, theirs = (jax.tree.leaves(run(rows, vectors)) for run in (tiles, passes))
    assert len(ours) == len(theirs) == len(expected) == 3 + stored
    for mine, other, value in zip(ours, theirs, expected, strict=True):
        assert mine.shape == other.shape == value.shape
        assert mine.dtype == other.dtype == (dtype if value.ndim == 2 else f32)
        error = lambda x, v=value: np.abs(np.asarray(x, np.float64) - v).max() / np.abs(v).max()
        assert error(mine) <= max(2 * error(other), 1e-6)


def test_tiles_that_do_not_divide_are_refused():
    rows = [_normal(0, (100, CHANNELS))] * 2
    with pytest.raises(ValueError, match="do not divide 100 rows of 48 channels"):
        in_tiles(_backward(f32), 1, rows, [_normal(1, (CHANNELS,))] * 2, TILING)


@pytest.mark.parametrize(
    ("batch", "side", "channels"),
    [(128, 14, 1024), (128, 7, 2048), (256, 56, 64), (128, 56, 256), (96, 28, 512)],
)
def test_the_arrays_of_residual_networks_have_a_tiling(batch, side, channels):
    rows = batch * side * side
    tiling = tiling_of(rows, channels)
    assert tiling is not None
    assert not rows % tiling.rows and not channels % tiling.columns
    tiles, blocks = rows // tiling.rows, channels // tiling.columns
    assert 132 <= tiling.programs * blocks <= 528
    most = -(-tiles // tiling.programs)
    assert tiles > (most - 0.5) * tiling.programs, "few programs wait for those with a tile more"


@pytest.mark.parametrize(("rows", "channels"), [(25_088, 24), (25_089, 256), (2, 256)])
def test_arrays_that_no_tile_divides_have_none(rows, channels):
    assert tiling_of(rows, channels) is None


@pytest.mark.gpu_compile
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_kernel_compiles_and_one_other_sums_what_its_programs_sum(dtype):
    from vmem_jax.devices.targets import target
    from vmem_jax.jax_compat import on_described_gpu

    size = 25_088, 1024
    sharding = target("h100").sharding()
    make = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    rows, vectors = [make(size, dtype)] * 2, [make(size[1:], "float32")] * 2
    tiling = tiling_of(*size)
    assert tiling is not None
    with on_described_gpu("NVIDIA H100"):
        run = jax.jit(lambda *given: in_tiles(_backward(dtype), 1, *given, tiling))
        compiled = run.lower(rows, vectors).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.temp_size_in_bytes <= 2 * 4 * 3 * tiling.programs * size[1]
    kernels = [line for line in text.split("ENTRY")[1].splitlines() if "metadata" in line]
    assert sum("gpu.triton" in line for line in kernels) == 1
    assert sum(" fusion(" in line for line in kernels) == 1
