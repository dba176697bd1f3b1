"""products: their kernels compile for an H200 that is not there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from vmem_jax.conv.carried import TILINGS, tiling_for
from vmem_jax.conv.products import Around, Operands, Tiling, in_tiles
from vmem_jax.devices.targets import target
from vmem_jax.jax_compat import on_described_gpu


@pytest.mark.gpu_compile
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_kernel_compiles_without_memory_beside_its_results(dtype):
    def behind(product):
        y = product.astype(dtype)
        return y, y.astype(jnp.float32)

    around = Around(lambda x, scale: (jax.nn.relu(x * scale.astype(x.dtype)),), behind)
    sharding = target("h200").sharding()
    make = lambda *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    given = Operands(make(64, 256), [make(802_816, 64)], [make(64)])
    tiling = Tiling(64, 256, 264, 8, 3)
    with on_described_gpu("NVIDIA H200"):
        compiled = jax.jit(lambda given: in_tiles(around, given, tiling)).lower(given).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes < 802_816 * 256 * 2 + 4096
    assert memory.temp_size_in_bytes < 2**20  # the sums of each program


def test_a_kernel_is_taken_only_for_widths_that_were_measured():
    rows = 802_816
    assert tiling_for(rows, 64, 256, 1, 0, gradient=False) == TILINGS[64, 256, 1, 0, False]
    assert tiling_for(rows, 256, 64, 2, 0, gradient=False) == TILINGS[256, 64, 2, 0, False]
    assert tiling_for(rows, 256, 64, 2, 1, gradient=True) == TILINGS[256, 64, 3, 1, True]
    assert tiling_for(rows, 512, 128, 1, 0, gradient=False) is None  # its values are wrong
    assert tiling_for(rows, 64, 256, 2, 0, gradient=False) is None
    assert tiling_for(rows + 1, 64, 256, 1, 0, gradient=False) is None
    assert tiling_for(12_544, 64, 256, 1, 0, gradient=False) is None


@pytest.mark.gpu_compile
def test_a_network_compiles_to_these_kernels(monkeypatch):
    import test_carried as networks
    from jax.extend.core import jaxpr_as_fun

    from vmem_jax.rewrite.carried import with_carried

    monkeypatch.setattr(networks, "WIDE", 256)
    monkeypatch.setattr(networks, "NARROW", 64)
    monkeypatch.setattr(networks, "LARGE", (32, 56, 56, 256))
    step, args = networks.raw(networks.bottleneck)
    flat, found = networks.found_in((step, args))
    sharding = target("h200").sharding()
    leaves = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in jax.tree.leaves(args)
    ]
    peaks = []
    for jaxpr in (flat, with_carried(flat, found)):
        compiled = jax.jit(jaxpr_as_fun(jaxpr)).lower(*leaves).compile()
        peaks.append(compiled.memory_analysis().temp_size_in_bytes)
    assert compiled.as_text().count("gpu.triton") == len(found) == 7
    assert peaks[1] < 0.9 * peaks[0]
