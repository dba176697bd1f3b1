"""order: which steps the canonical order moves, on programs drawn by hand; laws on random ones."""

from __future__ import annotations

import pytest
from helpers import BACKWARD, UPDATE, Builder, programs, unit_costs
from hypothesis import given, settings

from vmem_jax.core.simulate import simulate
from vmem_jax.policy.order import canonical_order, lower_order


def test_a_value_for_later_is_made_just_before_it_is_read():
    b = Builder()
    x = b.input(8)
    mask = b.step([x], 64)
    y = b.step([b.step([x], 8)], 8)
    program = b.program([b.step([y, mask], 8, BACKWARD)])
    assert canonical_order(program) == (1, 2, 0, 3)


@pytest.mark.parametrize("also_read_late, moves", [(True, True), (False, False)])
def test_a_chain_moves_as_one(also_read_late, moves):
    """A projection and its rotation are of one size, so that the rotation alone frees nothing. What
    the projection reads is kept for a weight gradient, and then the two may wait; if not, they would
    keep as much as they leave."""
    b = Builder()
    x = b.step([b.input(8)], 64)
    projected = b.step([x], 64)
    rotated = b.step([projected], 64)
    y = b.step([b.step([x], 8)], 8)
    loss = b.step([b.step([y], 8), rotated], 8)
    reads = [loss, x] if also_read_late else [loss]
    program = b.program([b.step(reads, 8, BACKWARD)])
    at = canonical_order(program).index
    assert at(2) == at(1) + 1
    assert (at(1) > at(5)) is moves


@pytest.mark.parametrize("read_between", [True, False])
def test_a_chain_stays_in_front_of_what_reads_a_value_of_it(read_between):
    b = Builder()
    x = b.input(8)
    first = b.step([x], 64)
    second = b.step([first], 64)
    y = b.step([x, first] if read_between else [x], 8)
    z = b.step([b.step([y], 8)], 8)
    program = b.program([b.step([z, second], 8, BACKWARD)])
    at = canonical_order(program).index
    assert (at(0) < at(2)) is read_between


def test_a_chain_that_reads_what_is_updated_runs_before_the_update():
    b = Builder()
    w = b.input(8)
    made = b.step([b.step([w], 64)], 64)
    gradient = b.step([b.step([b.input(8)], 8)], 8, BACKWARD)
    new = b.step([w, gradient], 8, UPDATE)
    program = b.program([new, b.step([gradient, made], 8, UPDATE)], [(w, new)])
    at = canonical_order(program).index
    assert at(0) < at(program.producer[new])


def test_a_weight_gradient_is_made_where_its_cotangent_dies():
    b = Builder()
    h = b.step([b.input(8)], 64)
    cotangent = b.step([h], 64, BACKWARD)
    other = b.step([cotangent], 64, BACKWARD)
    last = b.step([other], 64, BACKWARD)
    program = b.program([last, b.step([cotangent, h], 8, BACKWARD)])
    assert canonical_order(program) == (0, 1, 4, 2, 3)


@given(programs())
@settings(max_examples=200, deadline=None)
def test_every_step_runs_once_behind_what_it_reads(program):
    order = canonical_order(program)
    assert sorted(order) == list(range(len(program.steps)))
    at = {s: p for p, s in enumerate(order)}
    for s, step in enumerate(program.steps):
        assert all(at[m] < at[s] for b in step.reads if (m := program.producer[b]) >= 0)
    costs = unit_costs(program)
    traced = simulate(program, range(len(program.steps)), costs).peak
    assert simulate(program, lower_order(program, costs), costs).peak <= traced
