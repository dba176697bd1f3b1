"""Chains: √n memory for one more forward pass, fewer bytes for more; schedules drawn by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from helpers import chain, unit_costs

from vmem_jax import POLICIES
from vmem_jax.core.costs import Costs
from vmem_jax.core.validate import violations
from vmem_jax.policy import Infeasible


def forward_passes(plan, n):
    """Forward steps that run again, in forward passes."""
    return sum(s < n for s in plan.recomputed) / n


def plan(name, n, budget):
    program = chain(n)
    plan = POLICIES[name]().plan(program, unit_costs(program), budget)
    assert plan.predicted_peak <= budget
    assert violations(program, plan) == []
    return plan


# (activations beyond which, at most so many more forward passes): reached values, rounded up
ROOT = {"auto": 1.0, "recompute": 1.3}
LOGARITHM = {
    "auto": {16: 0.1, 64: 0.7, 256: 1.0, 1024: 1.9},
    "recompute": {16: 0.1, 64: 0.7, 256: 1.0, 1024: 2.2},
}


@pytest.mark.parametrize("n", [16, 64, 256, 1024])
@pytest.mark.parametrize("name", ROOT)
def test_root_n_memory_for_one_forward_pass(name, n):
    assert forward_passes(plan(name, n, 2 * math.isqrt(n) + 4), n) <= ROOT[name]


@pytest.mark.parametrize("n", [16, 64, 256, 1024])
@pytest.mark.parametrize("name", LOGARITHM)
def test_logarithmic_memory_for_a_few_forward_passes(name, n):
    budget = 3 * int(math.log2(n)) + 6
    assert forward_passes(plan(name, n, budget), n) <= LOGARITHM[name][n]


@pytest.mark.parametrize("n", [16, 64, 256, 1024])
def test_even_less_memory_is_paid_for(n):
    budget = 2 * int(math.log2(n)) + 6
    assert forward_passes(plan("auto", n, budget), n) <= 3.0


@pytest.mark.parametrize("n", [16, 64])
def test_less_memory_never_takes_less_time(n):
    seconds = [
        plan("auto", n, budget).predicted_seconds
        for budget in range(2 * int(math.log2(n)) + 4, n + 4, 3)
    ]
    assert all(tight >= wide - 1 for tight, wide in itertools.pairwise(seconds))


# chain(5): steps 0…4 are layers, 5 the loss, 6…10 the backward steps of layers 5…1. Its peak is 8:
# x and the last cotangent, five layers and the first cotangent.
@pytest.mark.parametrize(
    "budget, order",
    [
        (8, "0 1 2 3 4 5 6 7 8 9 10"),
        # one layer less: its second run comes just before the step that reads it
        (7, "0 1 2 3 4 5 6 7 8 0 9 10"),
    ],
)
def test_schedule_as_one_would_draw_it(budget, order):
    drawn = [int(s) for s in order.split()]
    program = chain(5)
    found = POLICIES["auto"]().plan(program, unit_costs(program), budget)
    assert len(found.order) == len(drawn)
    if not found.recomputed:
        assert list(found.order) == drawn
    assert found.predicted_seconds == len(drawn)


def test_the_cheapest_layer_is_made_again():
    program = chain(5)
    for cheap in range(3):  # the fourth comes back too early to help alone
        seconds = tuple(0.1 if s == cheap else 1.0 for s in range(len(program.steps)))
        plan = POLICIES["auto"]().plan(program, Costs("one cheap layer", seconds), 7)
        assert plan.recomputed == (cheap,)
        backward = 10 - cheap - 1  # the step that reads what that layer makes
        assert plan.order.index(backward) - 1 == len(plan.order) - 1 - plan.order[::-1].index(cheap)


def test_too_little_for_any_plan():
    program = chain(64)
    outcome = POLICIES["auto"]().plan(program, unit_costs(program), 4)
    assert isinstance(outcome, Infeasible)
    assert (outcome.policy, outcome.budget) == ("auto", 4)
    # the lowest that was found is reached when it is asked for
    assert plan("auto", 64, outcome.minimum_peak).predicted_peak <= outcome.minimum_peak
