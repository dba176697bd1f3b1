"""pareto: what a user gets of it, on a small step, and that budgets on it are met."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax.api import records
from vmem_jax.report.trade import trade_table
from vmem_jax.techniques import StepContext

WEIGHTS = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 6
BATCH = jax.ShapeDtypeStruct((256, 32), jnp.float32)


def step(params, x):
    def loss_of(params):
        y = x
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                y = jnp.tanh(y @ w) * y
        return jnp.square(y).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))


def test_points_are_monotone_and_their_budgets_are_met():
    points = vmem_jax.pareto(step, WEIGHTS, BATCH, points=4, donate_argnums=0)
    assert len(points) >= 2 and isinstance(points[0], vmem_jax.ParetoPoint)
    for before, after in itertools.pairwise(points):
        assert before.budget < after.budget
        assert before.predicted_seconds > after.predicted_seconds
    for point in points:
        assert point.budget == point.compiled_peak == point.plan.budget
        assert ("recompute" in point.techniques) == bool(point.plan.recomputed)
        assert ("sub_batches" in point.techniques) == (point.plan.sub_batches > 1)
    smallest = points[0]
    assert any(point.plan.recomputed for point in points)
    assert 4 * smallest.compiled_peak < points[-1].compiled_peak
    with pytest.raises(dataclasses.FrozenInstanceError):
        smallest.budget = 0
    again = vmem_jax.jit(step, budget=smallest.budget, donate_argnums=0)
    assert again.plan(WEIGHTS, BATCH).predicted_seconds <= smallest.predicted_seconds


def test_a_step_of_jit_has_its_settings_and_nothing_needs_a_compile(monkeypatch):
    compiled = []
    monkeypatch.setattr("vmem_jax.techniques.context.compile_jaxpr", compiled.append)
    kept = vmem_jax.jit(step, budget=0.5, allow="order", donate_argnums=0)
    points = vmem_jax.pareto(kept, WEIGHTS, BATCH, compile=False)
    assert not compiled
    assert points and all(set(p.techniques) <= {"order"} for p in points)
    assert {p.compiled_peak for p in points} == {None}


def test_a_second_sweep_compiles_nothing_that_the_first_one_did(monkeypatch):
    schedules = []

    def compile_plan(self, traced, plan):
        schedules.append(plan.schedule)
        return compile_one(self, traced, plan)

    compile_one = StepContext.compile
    monkeypatch.setattr(StepContext, "compile", compile_plan)
    records.forget()
    kept = vmem_jax.jit(step, budget=1.0, donate_argnums=0)
    for points in (2, 3):
        vmem_jax.pareto(kept, WEIGHTS, BATCH, points=points)
        assert schedules and len(schedules) == len({*schedules})


def test_what_makes_no_sense_is_refused():
    with pytest.raises(TypeError, match="budget"):
        vmem_jax.pareto(step, WEIGHTS, BATCH, budget=1)
    with pytest.raises(TypeError, match="allow"):
        vmem_jax.pareto(vmem_jax.jit(step, budget=1), WEIGHTS, BATCH, allow=("order",))
    with pytest.raises(ValueError, match="2"):
        vmem_jax.pareto(step, WEIGHTS, BATCH, points=1)


def test_the_table_has_a_row_for_each_point():
    points = vmem_jax.pareto(step, WEIGHTS, BATCH, points=2, compile=False, donate_argnums=0)
    assert trade_table("step", points).row_count == len(points) >= 2
