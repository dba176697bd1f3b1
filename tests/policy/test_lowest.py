"""lowest: the lowest peak that recomputation reaches, and the bytes below which nothing goes."""

from __future__ import annotations

import pytest
from helpers import SHAPES, Builder, chain, programs, unit_costs
from hypothesis import given, settings

from vmem_jax.core.liveness import least_nbytes
from vmem_jax.core.simulate import simulate
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.min_peak import lowest


def under(program, limit):
    """The executor's run."""
    order = range(len(program.steps))
    run = Execution(program, unit_costs(program), order, limit=limit)
    return simulate(program, run.order, unit_costs(program))


def reached(program):
    keeps = simulate(program, range(len(program.steps)), unit_costs(program))
    return lowest(program, keeps, lambda limit: under(program, limit))


@settings(max_examples=200, deadline=None)
@given(program=programs())
def test_it_lies_between_what_the_largest_step_takes_and_what_keeps_all(program):
    keeps = simulate(program, range(len(program.steps)), unit_costs(program)).peak
    assert least_nbytes(program) <= reached(program).peak <= keeps


@pytest.mark.parametrize("program", SHAPES.values(), ids=SHAPES)
def test_no_limit_of_the_executor_is_much_lower(program):
    found = reached(program)
    for limit in range(least_nbytes(program), found.peak):
        assert found.peak <= 1.1 * under(program, limit).peak


def test_a_deep_chain_needs_little():
    program = chain(64)
    assert simulate(program, range(len(program.steps)), unit_costs(program)).peak > 60
    assert reached(program).peak <= 6


@pytest.mark.parametrize("pure, peak", [(True, 13), (False, 14)])
def test_what_cannot_be_made_again_is_kept(pure, peak):
    b = Builder()
    x = b.input(1)
    large = b.step([x], 10, pure=pure)
    program = b.program([b.step([large, b.step([b.step([x], 1)], 1)], 1)])
    assert least_nbytes(program) == 13 and reached(program).peak == peak
