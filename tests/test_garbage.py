"""Nothing is collected while a step is traced and planned, and everything afterwards."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax.policy.auto import Auto

W, X = jnp.ones((32, 32)), jnp.ones((64, 32))


def watched(monkeypatch, seen):
    plan = Auto.plan

    def planned(self, *args):
        seen.append(gc.isenabled())
        return plan(self, *args)

    monkeypatch.setattr(Auto, "plan", planned)

    def step(w, x):
        seen.append(gc.isenabled())
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    return step


@pytest.mark.parametrize("budget", [2**30, 1])
def test_nothing_is_collected_while_a_step_is_planned(monkeypatch, budget):
    seen = []
    step = vmem_jax.jit(watched(monkeypatch, seen), budget=budget)
    if budget == 1:
        with pytest.raises(vmem_jax.BudgetError):
            step(W, X)
    else:
        step(W, X)
    assert len(seen) > 1 and not any(seen)
    assert gc.isenabled()


def test_who_collects_nothing_is_left_alone(monkeypatch):
    seen = []
    gc.disable()
    try:
        vmem_jax.jit(watched(monkeypatch, seen), budget=2**30)(W, X)
        assert not gc.isenabled() and not any(seen)
    finally:
        gc.enable()
