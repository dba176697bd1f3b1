"""Barriers in the scalar functions of reductions: XLA:CPU ends the process where one is left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vmem_jax
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.reducers import without_barriers_in_reducers

barrier = lax.optimization_barrier


def add(a, b):
    a, b = barrier((a, b))
    return barrier(a + b)


REDUCTIONS = {
    "reduce": lambda x: lax.reduce(x, jnp.float32(0), add, (1,)),
    "reduce in a call": lambda x: lax.reduce(x, jnp.float32(0), jax.jit(add), (1,)),
    "pairs": lambda x: lax.reduce(
        (x, 2 * x), (jnp.float32(0),) * 2, lambda a, b: tuple(map(add, a, b)), (0,)
    )[1],
    "windows": lambda x: lax.reduce_window(x, jnp.float32(0), add, (2, 2), (1, 1), "SAME"),
    "scatter": lambda x: x.at[1:3].apply(lambda v: barrier(v * 2)),
    "in a loop": lambda x: lax.scan(
        lambda c, row: (c, lax.reduce(row, jnp.float32(0), add, (0,))), 0.0, x
    )[1],
    "in a branch": lambda x: lax.cond(
        x[0, 0] > 0, lambda x: lax.reduce(x, jnp.float32(0), add, (1,)), lambda x: x[0], x
    ),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_step_with_a_barrier_in_a_reducer_runs(name):
    reduced = REDUCTIONS[name]

    def step(w, x):
        def loss_of(w):
            y = jnp.tanh(jnp.sin(jnp.cos(x @ w) @ w) @ w)
            return jnp.square(y).sum(), reduced(lax.stop_gradient(y))

        grad, seen = jax.grad(loss_of, has_aux=True)(w)
        return w - 0.1 * grad, seen

    args = jnp.eye(16), jnp.ones((256, 16)) / 3
    if name == "in a branch":
        args = args[0], args[1][:16]
    plain = jax.jit(step).lower(*args).compile()
    lower = vmem_jax.jit(step, budget=0.9, policy="recompute").lower(*args)
    compiled = lower.compile()
    assert compiled.plan.fenced
    for a, b in zip(compiled(*args), plain(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_no_barrier_is_left_in_it(name):
    closed = jax.jit(REDUCTIONS[name]).trace(jnp.ones((16, 16))).jaxpr
    assert "optimization_barrier" in str(closed)
    assert "optimization_barrier" not in str(flatten(closed))


def test_other_barriers_stay():
    closed = jax.make_jaxpr(lambda x: barrier(jnp.sin(barrier(x))).sum())(jnp.ones(4))
    assert without_barriers_in_reducers(closed) is closed
