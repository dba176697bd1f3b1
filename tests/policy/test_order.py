"""The canonical order: what sinks, what is hoisted, and what must stay."""

from __future__ import annotations

import pytest
from helpers import BACKWARD, SHAPES, UPDATE, Builder, plan_of, programs, unit_costs
from hypothesis import given, settings

from vmem_jax.core.simulate import simulate
from vmem_jax.core.validate import violations
from vmem_jax.policy.order import canonical_order


def test_residual_only_work_sinks_to_its_first_use():
    b = Builder()
    x = b.input(100)
    y = b.step([x], 100)
    b.step([x], 50)  # a mask that only the backward pass reads, of something that is held anyway
    mask = len(b.buffers) - 1
    z = b.step([y], 100)
    loss = b.step([z], 1)
    grad = b.step([loss, mask], 100, BACKWARD)
    assert canonical_order(b.program([grad])) == (0, 2, 3, 1, 4)


def test_a_chain_of_residual_only_work_sinks_as_a_whole():
    b = Builder()
    x = b.input(100)
    a = b.step([x], 40)
    c = b.step([a], 50)
    y = b.step([x], 100)
    loss = b.step([y], 1)
    grad = b.step([loss, c], 100, BACKWARD)
    assert canonical_order(b.program([grad])) == (2, 3, 0, 1, 4)


def test_work_that_would_hold_more_than_it_frees_stays():
    b = Builder()
    x = b.input(1)
    big = b.step([x], 100)
    small = b.step([big], 10)
    y = b.step([x], 100)
    loss = b.step([y], 1)
    grad = b.step([loss, small], 100, BACKWARD)
    assert canonical_order(b.program([grad])) == (0, 1, 2, 3, 4)


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


def test_steps_with_effects_do_not_sink():
    b = Builder()
    x = b.input(100)
    mask = b.step([x], 50, pure=False)
    y = b.step([x], 100)
    loss = b.step([y], 1)
    grad = b.step([loss, mask], 100, BACKWARD)
    assert canonical_order(b.program([grad])) == (0, 1, 2, 3)


def test_weight_gradient_is_hoisted_to_its_cotangent():
    b = Builder()
    x = b.input(8)
    h = b.step([x], 100)
    cotangent = b.step([h], 100)
    down = b.step([cotangent], 100, BACKWARD)
    further = b.step([down], 100, BACKWARD)
    gradient = b.step([cotangent, h], 8, BACKWARD)
    program = b.program([b.step([further, gradient], 1, BACKWARD)])
    # step 4 frees h and the cotangent once step 2 has read it: it goes there, not to the end
    assert canonical_order(program) in ((0, 1, 2, 4, 3, 5), (0, 1, 4, 2, 3, 5))
    assert peak(program, canonical_order(program)) < peak(program, range(6))


def test_update_follows_its_gradient_but_not_before_the_last_read_of_the_old_value():
    b = Builder()
    p, x = b.input(50), b.input(8)
    h = b.step([x, p], 100)
    loss = b.step([h], 100)
    gradient = b.step([loss, h], 50, BACKWARD)
    through = b.step([loss, p], 8, BACKWARD)
    last = b.step([through], 8, BACKWARD)
    new = b.step([p, gradient], 50, UPDATE)
    program = b.program([new, last], [(p, new)])
    order = canonical_order(program)
    assert order.index(5) > max(order.index(2), order.index(3))
    assert violations(program, plan_of(program, order)) == []


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_keeps_a_valid_order_and_gains_nothing_to_lose(name):
    program = SHAPES[name]
    order = canonical_order(program)
    assert violations(program, plan_of(program, order)) == []
    assert peak(program, order) <= peak(program, range(len(program.steps)))


@settings(max_examples=200, deadline=None)
@given(programs(pure=True))
def test_random_programs_keep_a_valid_order(program):
    order = canonical_order(program)
    assert sorted(order) == list(range(len(program.steps)))
    assert violations(program, plan_of(program, order)) == []


def test_effects_stay_in_order():
    b = Builder()
    x = b.input(2)
    first, second = b.step([x], (7, 16))
    b.step([second, first], 7, pure=False)
    small = b.step([first], 1)
    gone = b.step([second], 1, pure=False)
    program = b.program([small, gone])
    assert violations(program, plan_of(program, canonical_order(program))) == []


def peak(program, order):
    return simulate(program, order, unit_costs(program)).peak
