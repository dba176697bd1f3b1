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
