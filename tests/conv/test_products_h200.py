"""products: their kernels compile for an H200 that is not there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

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
