"""Kernels of convolutions that carry what stands around them, on a GPU, beside passes of XLA's."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import test_carried as networks
import test_pooling as pools
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.carried import find_carrying
from vmem_jax.capture.pooling import find_pooling
from vmem_jax.capture.summing import find_summing
from vmem_jax.rewrite.carried import with_carried
from vmem_jax.rewrite.pooling import with_pooling
from vmem_jax.rewrite.summing import with_summing

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["bfloat16", "float16"])
def case(request, monkeypatch):
    """A bottleneck block as wide as kernels want it: its step and arguments."""
    monkeypatch.setattr(networks, "WIDE", 256)
    monkeypatch.setattr(networks, "NARROW", 64)
    monkeypatch.setattr(networks, "LARGE", (32, 56, 56, 256))
    return networks.raw(networks.bottleneck, request.param)


def kernels(closed, name):
    """What the equations with that parameter compute, each by a kernel."""
    found = [e.params[name] for e in compat.open_jaxpr(closed).eqns if name in e.params]
    assert all(each.tiling is not None for each in found)
    return found


def assert_as_near(ours, theirs, args, factor):
    """The values of `ours` are from those in float32 at most `factor` times as far as those of
    `theirs`."""
    run = lambda jaxpr: jax.jit(jaxpr_as_fun(jaxpr))(*jax.tree.leaves(args))
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.leaves(jax.jit(networks.raw(networks.bottleneck, "float32")[0])(*args))
    off = lambda x, y: float(np.sqrt(np.square(np.asarray(x) - np.asarray(y)).mean()))
    for a, b, value in zip(run(ours), run(theirs), exact, strict=True):
        assert off(a, value) <= factor * off(b, value) + 1e-6


def test_values_are_as_near_to_float32_as_those_of_passes(case):
    step, args = case
    flat, found = networks.found_in((step, args))
    ours = with_carried(flat, found)
    assert len(kernels(ours, "carried")) == 7
    assert_as_near(ours, flat, args, 2)


def test_one_pass_sums_as_near_to_float32_as_several(case):
    step, args = case
    flat, _ = networks.found_in((step, args))
    ours = with_summing(flat, find_summing(flat))
    assert len(kernels(ours, "summed")) == 5
    assert_as_near(ours, flat, args, 1.2)


@pytest.mark.parametrize("name", ["carried", "summed", "pooled"])
def test_a_nan_is_not_hidden(case, name):
    """By a ReLU in a kernel of Triton, whose maximum returns the other operand."""
    step, (params, x) = case
    if name == "pooled":
        step, (params, x) = pools.stem(side=56)
    args = params, x.at[0, 3, 3].set(np.nan)
    flat = networks.found_in((step, args))[0]
    find, rewrite = {
        "carried": (find_carrying, with_carried),
        "summed": (find_summing, with_summing),
        "pooled": (find_pooling, with_pooling),
    }[name]
    ours = rewrite(flat, find(flat))
    assert kernels(ours, name)
    *_, loss = jax.jit(jaxpr_as_fun(ours))(*jax.tree.leaves(args))
    assert np.isnan(loss)
