"""lowest: the lowest peak that recomputation reaches, and the bytes below which nothing goes."""

from __future__ import annotations

import pytest
from helpers import SHAPES, Builder, chain, programs, unit_costs
from hypothesis import given, settings

from vmem_jax.core.simulate import least_nbytes, simulate
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.lowest import lowest


@settings(max_examples=200, deadline=None)
@given(program=programs())
def test_it_lies_between_what_the_largest_step_takes_and_what_keeps_all(program):
    order = range(len(program.steps))
    keeps = simulate(program, order, unit_costs(program)).peak
    assert least_nbytes(program) <= lowest(program, unit_costs(program), order).peak <= keeps


@pytest.mark.parametrize("program", SHAPES.values(), ids=SHAPES)
def test_no_limit_of_the_executor_is_much_lower(program):
    costs, order = unit_costs(program), range(len(program.steps))
    found = lowest(program, costs, order)
    for limit in range(least_nbytes(program), found.peak):
        run = Execution(program, costs, order, limit=limit)
        assert found.peak <= 1.1 * simulate(program, run.order, costs).peak


def test_a_deep_chain_needs_little():
    program = chain(64)
    order = range(len(program.steps))
    assert simulate(program, order, unit_costs(program)).peak > 60
    assert lowest(program, unit_costs(program), order).peak <= 6


@pytest.mark.parametrize("pure, peak", [(True, 13), (False, 14)])
def test_what_cannot_be_made_again_is_kept(pure, peak):
    b = Builder()
    x = b.input(1)
    large = b.step([x], 10, pure=pure)
    program = b.program([b.step([large, b.step([b.step([x], 1)], 1)], 1)])
    order = range(len(program.steps))
    assert least_nbytes(program) == 13
    assert lowest(program, unit_costs(program), order).peak == peak
