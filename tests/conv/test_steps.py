"""Convolutions in micro-batches as a means of the plan: whole training steps on a CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vmem_jax
from vmem_jax.core.convolution import Pass
from vmem_jax.prove.prove import need_nbytes

WITH, WITHOUT = ("order", "recompute", "workspace"), ("order", "recompute")


def conv(x, w):
    with jax.named_scope(f"conv{w.shape[1]}to{w.shape[0]}"):
        numbers = ("NCHW", "OIHW", "NCHW")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def step(params, batch):
    """One wide layer in the middle: there its workspace is the peak."""
    x, y = batch

    def loss_of(params):
        h = jnp.tanh(conv(x, params["in"]))
        h = jnp.tanh(conv(h, params["wide"]))
        h = jnp.tanh(conv(h, params["back"]))
        return jnp.square(h.mean((2, 3)) @ params["out"] - y).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.1 * rng.standard_normal(shape), jnp.float32)
    params = {"in": draw(8, 3, 3, 3), "wide": draw(24, 8, 3, 3), "back": draw(8, 24, 3, 3)}
    return params | {"out": draw(8, 5)}, (draw(32, 3, 24, 24), draw(32, 5))


@functools.cache
def planned(share: float, allow: tuple[str, ...]):
    budgeted = vmem_jax.jit(step, budget=share, allow=allow)
    return budgeted, budgeted.plan(*arguments())


def test_it_fits_divides_and_gives_the_same_numbers():
    args = arguments()
    budgeted, plan = planned(0.8, WITH)
    divided = dict(plan.divided)
    assert divided, plan
    text = budgeted.lower(*args).compile()
    assert need_nbytes(text) <= plan.budget
    expected, got = jax.jit(step)(*args), budgeted(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, expected)


def test_less_is_recomputed_than_without():
    _, plan = planned(0.8, WITH)
    _, without = planned(0.8, WITHOUT)
    assert without.convolutions == () and without.recomputed
    assert len(plan.recomputed) < len(without.recomputed)


def test_explain_says_who_runs_what():
    args = arguments()
    budgeted, plan = planned(0.8, WITH)
    text = str(budgeted.explain(*args))
    assert f"{len(plan.divided)} convolutions in micro-batches" in text
    rows = [line for line in text.splitlines() if "conv8to24" in line and "│" in line]
    passes = {which for which in Pass for line in rows if f"│ {which.value} " in line}
    assert passes == set(Pass)
    assert sum("slices of XLA's" in line for line in text.splitlines()) == len(plan.divided)


def test_a_saved_plan_runs_again(tmp_path):
    args = arguments()
    _, plan = planned(0.8, WITH)
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=vmem_jax.Plan.load(tmp_path / "plan.json"))
    assert need_nbytes(again.lower(*args).compile()) <= plan.budget
    np.testing.assert_allclose(again(*args)[1], jax.jit(step)(*args)[1], rtol=1e-5)


def test_what_cannot_be_divided_is_said():
    with pytest.raises(ValueError, match=r"`step` cannot divide convolutions: what .* 'h200' is"):
        vmem_jax.jit(step, budget="1GiB", allow=WITH).plan(*arguments(), target="h200")

    def dense(w, x):
        return w - jax.grad(lambda w: jnp.square(x @ w).sum())(w)

    with pytest.raises(
        ValueError, match="`dense` cannot divide convolutions: it has no convolution"
    ):
        vmem_jax.jit(dense, budget="1GiB", allow=WITH)(jnp.ones((4, 4)), jnp.ones((4, 4)))
