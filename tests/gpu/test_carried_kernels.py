"""Kernels of convolutions that carry what stands around them, on a GPU, beside passes of XLA's."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import test_carried as networks
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.summing import find_summing
from vmem_jax.rewrite.carried import with_carried
from vmem_jax.rewrite.summing import with_summing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_as_near_to_float32_as_those_of_passes(dtype, monkeypatch):
    monkeypatch.setattr(networks, "WIDE", 256)
    monkeypatch.setattr(networks, "NARROW", 64)
    monkeypatch.setattr(networks, "LARGE", (32, 56, 56, 256))
    step, args = networks.raw(networks.bottleneck, dtype)
    flat, found = networks.found_in((step, args))
    ours = with_carried(flat, found)
    carried = [e.params["carried"] for e in compat.open_jaxpr(ours).eqns if "carried" in e.params]
    assert len(carried) == 7 and all(each.tiling is not None for each in carried)
    run = lambda jaxpr: jax.jit(jaxpr_as_fun(jaxpr))(*jax.tree.leaves(args))
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.leaves(jax.jit(networks.raw(networks.bottleneck, "float32")[0])(*args))
    off = lambda x, y: float(np.sqrt(np.square(np.asarray(x) - np.asarray(y)).mean()))
    for a, b, value in zip(run(ours), run(flat), exact, strict=True):
        assert off(a, value) <= 2 * off(b, value) + 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_pass_sums_as_near_to_float32_as_several(dtype, monkeypatch):
    monkeypatch.setattr(networks, "WIDE", 256)
    monkeypatch.setattr(networks, "NARROW", 64)
    monkeypatch.setattr(networks, "LARGE", (32, 56, 56, 256))
    step, args = networks.raw(networks.bottleneck, dtype)
    flat, _ = networks.found_in((step, args))
    found = find_summing(flat)
    ours = with_summing(flat, found)
    summed = [e.params["summed"] for e in compat.open_jaxpr(ours).eqns if "summed" in e.params]
    assert len(summed) == 5 and all(each.tiling is not None for each in summed)
    run = lambda jaxpr: jax.jit(jaxpr_as_fun(jaxpr))(*jax.tree.leaves(args))
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.leaves(jax.jit(networks.raw(networks.bottleneck, "float32")[0])(*args))
    off = lambda x, y: float(np.sqrt(np.square(np.asarray(x) - np.asarray(y)).mean()))
    for a, b, value in zip(run(ours), run(flat), exact, strict=True):
        assert off(a, value) <= 1.2 * off(b, value) + 1e-6
