"""validate: each rule broken once, and random valid orders pass."""

from __future__ import annotations

import dataclasses
import re

import pytest
from helpers import BACKWARD, SHAPES, UPDATE, Builder, chain, orders, plan_of, programs
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.core.validate import check_program, violations


def small() -> Builder:
    """x -> y (with an effect) -> z (with an effect) -> the new value of the donated parameter."""
    b = Builder()
    p, x = b.input(4), b.input(4)
    y = b.step([x, p], 4, pure=False)
    z = b.step([y], 4, pure=False)
    g = b.step([z], 4, BACKWARD)
    b.step([g, p], 4, UPDATE)
    return b


def program():
    return small().program([5], [(0, 5)])


def test_traced_order_is_valid():
    assert violations(program(), plan_of(program(), range(4))) == []


@pytest.mark.parametrize(
    "order, words",
    [
        ((0, 1, 2), "step 3 .* never runs"),
        ((0, 2, 1, 3), "step 2 .* at position 1 reads buffer 3 .b3. unmade"),
        ((0, 0, 1, 2, 3), "step 0 .* at position 1 is repeated but is not pure"),
        ((0, 1, 2, 3, 3), "step 3 .* reads donated input 0 after it was overwritten"),
        ((0, 1, 2, 3, 4), "position 4 names step 4 of 4"),
        ((0, 1, 2, -1, 3), "position 3 names step -1 of 4"),
    ],
)
def test_broken_order(order, words):
    broken = violations(program(), plan_of(program(), order))
    assert len(broken) == 1
    assert_matches(words, broken[0])


def test_effects_out_of_order():
    b = Builder()
    x = b.input(1)
    first, second = b.step([x], 1, pure=False), b.step([x], 1, pure=False)
    program = b.program([first, second])
    assert violations(program, plan_of(program, (1, 0))) == ["effects are out of order: [1, 0]"]


def assert_matches(pattern, text):
    assert re.search(pattern, text), text


def test_correct_programs_have_no_broken_invariants():
    assert check_program(program()) == []
    for shape in SHAPES.values():
        assert check_program(shape) == []


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda p: step(p, 0, reads=(9,)), "step 0 uses buffer 9 of 6"),
        (lambda p: step(p, 0, reads=(3,)), "step 0 reads buffer 3 before it is written"),
        (lambda p: step(p, 1, writes=(2,)), "step 1 writes buffer 2 a second time"),
        (lambda p: step(p, 1, writes=(0,)), "step 1 writes buffer 0 a second time"),
        (lambda p: step(p, 1, in_place=((0, 3),)), "pairs .0, 3. in place"),
        (lambda p: dataclasses.replace(p, outputs=(5, 6)), "output 6 is never written"),
        (lambda p: dataclasses.replace(p, aliases=((0, 5), (0, 5))), "an input is aliased twice"),
        (lambda p: dataclasses.replace(p, aliases=((0, 5), (1, 5))), "an output is aliased twice"),
        (lambda p: dataclasses.replace(p, aliases=((2, 5),)), "is not from an input"),
        (lambda p: dataclasses.replace(p, aliases=((0, 4),)), "is not from an input to an output"),
        (lambda p: resize(p, 5, 8), "joins buffers of different sizes"),
    ],
)
def test_broken_program(change, words):
    assert_matches(words, "; ".join(check_program(change(program()))))


def step(program, s, **changes):
    steps = list(program.steps)
    steps[s] = dataclasses.replace(steps[s], **changes)
    return dataclasses.replace(program, steps=tuple(steps))


def resize(program, b, nbytes):
    buffers = list(program.buffers)
    buffers[b] = dataclasses.replace(buffers[b], nbytes=nbytes)
    return dataclasses.replace(program, buffers=tuple(buffers))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_programs_and_orders_are_valid(data):
    program = data.draw(programs())
    assert check_program(program) == []
    assert violations(program, plan_of(program, data.draw(orders(program)))) == []


def test_repeated_layer_of_a_chain_is_valid():
    assert violations(chain(3), plan_of(chain(3), [0, 1, 2, 3, 4, 0, 5, 6])) == []
