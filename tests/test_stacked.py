"""A product that a loop stacks and that its iteration reads as well is computed once."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import flatten
from vmem_jax.compiler.compile import with_ours
from vmem_jax.devices.targets import target
from vmem_jax.rewrite.bodies import with_ordered_bodies

LAYERS = 4


def stacking(body, width, dtype=jnp.float32):
    """A loop of `body`, and its arguments: weights [LAYERS, width, width] and [256, width]."""
    shapes = (LAYERS, width, width), (256, width)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return flatten(jax.jit(lambda ws, x: lax.scan(body, x, ws)).trace(*args).jaxpr), args


def read_too(x, w):
    y = x @ w
    return jnp.sin(y), y


def read_behind_a_sum(x, w):
    y = x + x @ w
    return jnp.sin(y), y


def carried_too(x, w):
    y = x @ w
    return y, y


def stacked_alone(x, w):
    return jnp.sin(x), x @ w


def barriers(flat):
    [scan] = [eqn for eqn in compat.open_jaxpr(flat).eqns if eqn.primitive.name == "scan"]
    eqns = compat.open_jaxpr(scan.params["jaxpr"]).eqns
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in eqns)


@pytest.mark.parametrize(
    ("body", "width", "platform", "count"),
    [
        (read_too, 512, "gpu", 1),
        (read_behind_a_sum, 512, "gpu", 1),
        (carried_too, 512, "gpu", 1),
        (read_too, 64, "gpu", 0),  # again it takes no longer than a copy
        (stacked_alone, 512, "gpu", 0),
        (read_too, 512, "cpu", 0),
    ],
)
def test_a_barrier_stands_before_the_stack_of_what_would_be_computed_twice(
    body, width, platform, count
):
    flat, args = stacking(body, width)
    made = with_ordered_bodies(flat, platform)
    assert barriers(made) == count
    given = [jax.random.normal(jax.random.key(n), a.shape) for n, a in enumerate(args)]
    for ours, theirs in zip(jaxpr_as_fun(made)(*given), jaxpr_as_fun(flat)(*given), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("body", [read_too, read_behind_a_sum, carried_too])
def test_a_library_computes_it_once(body):
    flat, args = stacking(body, 1024, jnp.bfloat16)
    options = with_ours({"xla_gpu_enable_triton_gemm": "False"}, "gpu", 1, described=True)
    sharding = target("h200").sharding()
    there = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in args]
    run = jaxpr_as_fun(with_ordered_bodies(flat, "gpu"))
    text = jax.jit(run).lower(*there).compile(compiler_options=options).as_text()
    assert len(re.findall(r'custom_call_target="__cublas', text)) == 1
