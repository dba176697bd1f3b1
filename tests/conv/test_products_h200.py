"""products: their kernels compile for an H200 that is not there, and take what one took."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import Builder

from vmem_jax.conv.carried import KNOWN, known_for
from vmem_jax.conv.products import Around, Operands, Tiling, in_tiles
from vmem_jax.core.cards import CARDS
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
    assert known_for(rows, 64, 256, 1, 0, gradient=False) == KNOWN[64, 256, 1, 0, False]
    assert known_for(rows, 256, 64, 2, 0, gradient=False) == KNOWN[256, 64, 2, 0, False]
    assert known_for(rows, 256, 64, 2, 1, gradient=True) == KNOWN[256, 64, 2, 1, True]
    assert known_for(rows, 512, 128, 1, 0, gradient=False) is None  # its values are wrong
    assert known_for(rows, 64, 256, 2, 0, gradient=False) is None
    assert known_for(rows + 1, 64, 256, 1, 0, gradient=False) is None
    assert known_for(12_544, 64, 256, 1, 0, gradient=False) is None


READ = {  # kind of a row -> arrays of either width that its kernel reads, both products
    "scale": (1, 0, False),
    "sums": (1, 0, False),
    "join": (2, 0, False),
    "backward scale": (2, 1, True),
    "backward join": (2, 3, True),
}


def test_a_kernel_is_predicted_to_take_what_it_took():
    """By the operations of its products; of XLA's passes by bandwidth."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_products.jsonl"
    machine = CARDS["h200"].machine
    b = Builder()
    b.step([b.input(8)], 8, op="carried_product")
    found = 0
    for row in map(json.loads, path.read_text().splitlines()):
        *wide, has_gradient = READ[row["kind"]]
        size = row["rows"], row["a"], row["b"]
        known = known_for(*size, *wide, gradient=has_gradient)
        if known is None or row["dtype"] != "bfloat16":
            continue
        found += 1
        step = dataclasses.replace(
            b.steps[0],
            dtype="bfloat16",
            flops=2 * math.prod(size) * (2 if has_gradient else 1),
            nbytes=row["nbytes"],
            efficiency=known.flops / machine.convolutions["bfloat16"],
        )
        assert machine.seconds(step) == pytest.approx(1e-3 * row["kernel_ms"], rel=0.03)
    assert found == len(KNOWN)


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
