"""The zeros that plain jit writes to stacks of loops on a GPU: whether XLA does, and their price."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.capture.zeroed_stacks import as_zeroed
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import analytic

MACHINE = CARDS["h200"].machine
LAYERS, MIB = 16, 2**20
SHAPES = (
    jax.ShapeDtypeStruct((LAYERS, 512, 512), jnp.float32),
    jax.ShapeDtypeStruct((4096, 512), jnp.float32),
)


def trained(ws, x):
    """Stacks the inputs and the cosines of the layers, and the gradients of weights."""

    def loss(ws):
        return jnp.sum(lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0] ** 2)

    return ws - 0.1 * jax.grad(loss)(ws)


def zeros_nbytes(fun, *shapes, platform="gpu"):
    found = capture(jax.jit(fun).trace(*shapes).jaxpr, platform=platform)
    costs = analytic(found.program, MACHINE)
    plain = as_zeroed(costs, found.program, found.flat, found.shards, MACHINE)
    return (sum(plain.seconds) - sum(costs.seconds)) * MACHINE.bandwidth


def test_each_stack_is_written_once_more():
    stacks = LAYERS * (2 * 8 + 1) * MIB  # values of 8 MiB, gradients of 1
    assert zeros_nbytes(trained, *SHAPES) == pytest.approx(stacks, rel=1e-6)


def test_what_is_carried_or_on_a_cpu_is_not():
    carried = lambda ws, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
    assert zeros_nbytes(carried, *SHAPES) == 0
    assert zeros_nbytes(trained, *SHAPES, platform="cpu") == 0


def test_stacks_of_a_loop_in_a_loop_are_written_in_each_iteration():
    def step(ws, x):
        inner = lambda x, w: (jnp.tanh(x @ w), jnp.sin(x))
        outer = lambda x, _: (lax.scan(inner, x, ws)[1].sum(0), None)
        return lax.scan(outer, x, length=3)[0]

    assert zeros_nbytes(step, *SHAPES) == pytest.approx(3 * LAYERS * 8 * MIB, rel=1e-6)


def test_the_step_as_plain_jit_runs_it_has_them():
    context = vmem_jax.jit(trained, budget=1).context(SHAPES, {}, "h200")
    more = sum(context.plain_costs.seconds) - sum(context.costs.seconds)
    assert more * MACHINE.bandwidth == pytest.approx(LAYERS * 17 * MIB, rel=1e-6)


@pytest.mark.gpu_compile
def test_xla_writes_them_in_plain_jit_alone():
    pytest.importorskip("jax_plugins.xla_cuda13")

    def compiled(policy):
        step = vmem_jax.jit(trained, budget="8GiB", policy=policy, donate_argnums=0)
        return step.lower(*SHAPES).compile(target="h200").as_text()

    zeros = f"= f32[{LAYERS},4096,512]{{2,1,0}} broadcast("
    assert zeros in compiled("keep") and zeros not in compiled("exact")
