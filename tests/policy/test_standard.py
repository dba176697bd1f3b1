"""The usual checkpoint policies as choices of the planner, which it never loses to by prediction."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import chain, plan_of, unit_costs
from jax.extend.core import jaxpr_as_fun

pytest.importorskip("flax")

from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import analytic
from vmem_jax.core.program import Phase, Program
from vmem_jax.core.simulate import simulate
from vmem_jax.core.validate import violations
from vmem_jax.models import job
from vmem_jax.policy import Auto, Infeasible, auto
from vmem_jax.policy.drop_order import order_with_drops
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.order import canonical_order, lower_order
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.recomputation import Recomputation
from vmem_jax.policy.standard import cuts, standard_choices
from vmem_jax.rewrite.rewrite import rewrite

MACHINE = CARDS["h200"].machine
LAYERS = 6


@functools.cache
def _program(name: str) -> Program:
    shape = {"tokens": 128, "classes": 500} if name.startswith("gpt") else {"image": 160}
    work = job(name, batch=8, optimizer="adamw", param_dtype="float32", **shape)
    state = work.state_shapes()
    closed = jax.jit(work.step).trace(state, work.batch).jaxpr
    donated = [True] * len(jax.tree.leaves(state)) + [False] * 2
    return capture(closed, donated=donated).program


NETWORKS = [f"gpt{LAYERS}w256", f"vit{LAYERS}w256"]


@pytest.mark.parametrize("name", NETWORKS)
def test_no_standard_policy_is_faster_within_its_own_peak(name):
    program = _program(name)
    costs = analytic(program, MACHINE)
    recomputation = Recomputation(program, lower_order(program, costs))
    free = simulate(program, recomputation.base, costs)
    choices = standard_choices(recomputation)
    names = {choice.name for choice in choices}
    assert {"dots", "dots without batch dimensions", "every 1th block from 0"} <= names
    for choice in choices:
        order = Execution(
            program, costs, recomputation.base, choice.drops, recomputation=recomputation
        ).order
        by_hand = simulate(program, order, costs)
        assert by_hand.peak < free.peak and by_hand.seconds > free.seconds
        plan = Auto(allow=("order", "recompute")).plan(program, costs, by_hand.peak)
        assert not isinstance(plan, Infeasible)
        assert plan.predicted_seconds <= by_hand.seconds and not violations(program, plan)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_cuts_are_the_residual_stream(name):
    """Behind both parts of each layer, of one size; none is computed anew in each of its readers."""
    program = _program(name)
    found = cuts(program, canonical_order(program))
    of_blocks = [b for b in found if "block" in program.buffers[b].label.split(" ")[0]]
    assert 2 * LAYERS - 2 <= len(of_blocks) <= 2 * LAYERS
    assert len({program.buffers[b].nbytes for b in of_blocks}) == 1


def test_a_chain_is_cut_everywhere_and_root_n_of_it_are_kept():
    program = chain(64, size=10_000)
    recomputation = Recomputation(program, range(len(program.steps)))
    assert len(cuts(program, recomputation.base)) == 64
    costs = unit_costs(program)
    run = lambda drops: simulate(
        program, Execution(program, costs, recomputation.base, drops).order, costs
    )
    by_name = {choice.name: run(choice.drops) for choice in standard_choices(recomputation)}
    root = by_name["every 8th block from 0"]
    assert root.seconds < 2 * 64 + 1 + 64 and root.peak < 24 * 10_000


def test_those_that_peak_far_above_the_budget_are_not_tried(monkeypatch):
    program = _program(NETWORKS[0])
    costs = analytic(program, MACHINE)
    recomputation = Recomputation(program, lower_order(program, costs))
    choices = standard_choices(recomputation)
    orders = [order_with_drops(recomputation, each.drops) for each in choices]
    peaks = [simulate(program, order, costs).peak for order in orders]
    budget = int(0.95 * min(peaks))
    tried, under = [], auto._under_limit
    spy = lambda of, costs, drops, *rest: tried.append(drops) or under(of, costs, drops, *rest)
    monkeypatch.setattr(auto, "_under_limit", spy)
    Auto(allow=("order", "recompute")).plan(program, costs, budget)
    far = [PARAMS.standard_near * budget < peak for peak in peaks]
    assert any(far) and not all(far)
    for each, is_far in zip(choices, far, strict=True):
        assert not (is_far and each.drops in tried), each.name
    assert any(each.drops in tried for each in choices)


def test_a_program_without_blocks_has_no_standard_choices():
    program = capture(jax.make_jaxpr(lambda x: jnp.sin(x).sum())(jnp.ones(8))).program
    assert standard_choices(Recomputation(program, range(len(program.steps)))) == ()


def test_a_mask_is_made_again_from_a_key_that_is_made_of_nothing():
    program = _program(NETWORKS[0])
    recomputation = Recomputation(program, canonical_order(program))
    masks = [
        b
        for b, buffer in enumerate(program.buffers)
        if " bool[" in buffer.label and recomputation.uses[b] and buffer.nbytes > 10_000
        if any(program.steps[s].phase is Phase.BACKWARD for s in program.readers[b])
    ]
    assert len(masks) >= 2 * LAYERS
    assert all(recomputation.may_drop(b, recomputation.uses[b][-1]) for b in masks)
    costs = analytic(program, MACHINE)
    drops = {(b, len(recomputation.uses[b]) - 2) for b in masks}
    run = Execution(program, costs, recomputation.base, drops, recomputation=recomputation)
    assert len(run.order) > len(program.steps)


def test_a_mask_that_is_made_again_is_the_same():
    def step(w, x, count):
        def loss(w):
            key = jax.random.fold_in(jax.random.key(3), count)
            mask = jax.random.bernoulli(key, 0.9, x.shape)
            return (jnp.where(mask, jnp.sin(x @ w), 0) @ w).sum()

        return jax.grad(loss)(w)

    w, x = jnp.eye(64) / 8, jnp.ones((512, 64))
    found = capture(jax.jit(step).trace(w, x, 5).jaxpr)
    recomputation = Recomputation(found.program, canonical_order(found.program))
    drops = [
        (b, n)
        for b, n in recomputation.idle()
        if " bool[" in found.program.buffers[b].label and found.program.buffers[b].nbytes > 64
    ]
    order = Execution(found.program, unit_costs(found.program), recomputation.base, drops).order
    again = [found.program.steps[s].op for s in set(order) if order.count(s) > 1]
    assert "random_bits" in again and "random_seed" not in again
    rewritten = rewrite(found, plan_of(found.program, order))
    [result] = jax.jit(jaxpr_as_fun(rewritten))(w, x, 5)
    np.testing.assert_allclose(result, jax.jit(step)(w, x, 5), rtol=1e-5)
