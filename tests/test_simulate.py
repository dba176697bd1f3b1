"""simulate: exact live bytes on programs drawn by hand, the plain definition on random ones."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import BACKWARD, SHAPES, Builder, chain, orders, programs, unit_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.core.costs import Link
from vmem_jax.core.lanes import Copy
from vmem_jax.core.liveness import last_reads
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import Kind
from vmem_jax.core.simulate import live_at, nbytes_by_kind, simulate
from vmem_jax.core.validate import live_by_definition, peak_by_definition


def live(program, order=None):
    order = range(len(program.steps)) if order is None else order
    return list(simulate(program, order, unit_costs(program)).live_nbytes)


def test_chain_holds_every_layer_until_its_backward_step():
    # x is an input and the last cotangent an output: 2 bytes throughout. The other values in order:
    # v1, v2, v3, then the first cotangent beside them; v3 dies at the loss, v2 after the first
    # backward step; the last one writes into the output.
    assert live(chain(3)) == [3, 4, 5, 6, 6, 5, 3]


def test_recomputed_layer_dies_after_the_last_read_before_it_is_made_again():
    # As above, but v1 is made again (step 0) just before the second backward step reads it.
    order = [0, 1, 2, 3, 4, 0, 5, 6]
    assert live(chain(3), order) == [3, 4, 4, 5, 5, 4, 5, 3]


def test_peak_is_the_first_maximum():
    timeline = simulate(chain(3), range(7), unit_costs(chain(3)))
    assert (timeline.peak, timeline.peak_at, timeline.seconds) == (6, 3, 7.0)
    assert timeline.start == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def test_workspace_is_live_only_while_its_step_runs():
    b = Builder()
    x = b.input(1)
    y = b.step([x], 10, workspace=100)
    z = b.step([y], 10)
    out = b.step([z], 1)
    assert live(b.program([out])) == [112, 22, 12]


def test_in_place_write_takes_over_a_dying_read_only():
    b = Builder()
    x = b.input(1)
    y = b.step([x], 10)
    z = b.step([y], 10, in_place=True)  # y is read again below: no reuse
    w = b.step([y, z], 10, in_place=True)  # both die: one of them is taken over, once
    out = b.step([w], 1)
    assert live(b.program([out])) == [12, 22, 22, 12]


def test_in_place_pairs_share_no_buffer():
    b = Builder()
    x = b.input(1)
    y = b.step([x], 10)
    b.step([y], (10, 10))
    first, second = b.steps[-1].writes
    b.steps[-1] = dataclasses.replace(b.steps[-1], in_place=((y, first), (y, second)))
    out = b.step([first, second], 1)
    assert live(b.program([out])) == [12, 22, 22]


def test_unread_value_dies_at_once():
    b = Builder()
    x = b.input(1)
    b.step([x], 50)
    out = b.step([x], 1)
    assert live(b.program([out])) == [52, 2]


def test_no_steps_is_the_residents():
    b = Builder()
    x = b.input(7)
    timeline = simulate(b.program([x]), (), unit_costs(b.program([x])))
    # handed back without donation: a copy
    assert (timeline.peak, timeline.peak_at, timeline.live_nbytes) == (14, -1, ())


def test_donated_input_and_its_output_count_once():
    b = Builder()
    p = b.input(10)
    new = b.step([p], 10, BACKWARD)
    assert b.program([new]).resident_nbytes == 20
    assert b.program([new], [(p, new)]).resident_nbytes == 10
    assert b.program([p, new], [(p, p)]).resident_nbytes == 20


def test_live_at_and_kinds():
    program = chain(3)
    assert live_at(program, range(7), 3) == [1, 2, 3, 4]
    dying = [sorted(dead) for dead in last_reads(program, range(7))]
    assert dying == [[], [], [], [3], [2, 4], [1, 5], [6]]
    assert nbytes_by_kind(program, [0, 1, 2, 5]) == {
        Kind.ACTIVATION: 2,
        Kind.BATCH: 1,
        Kind.GRADIENT: 1,
    }


@pytest.mark.parametrize("name", SHAPES)
def test_peak_is_the_definitions_on_every_shape(name):
    program = SHAPES[name]
    order = tuple(range(len(program.steps)))
    assert simulate(program, order, unit_costs(program)).peak == peak_by_definition(program, order)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_live_bytes_are_the_definitions_on_random_orders(data):
    program = data.draw(programs())
    order = data.draw(orders(program))
    timeline = simulate(program, order, unit_costs(program))
    assert list(timeline.live_nbytes) == live_by_definition(program, order)
    assert timeline.peak == max(timeline.live_nbytes)
    assert timeline.peak >= program.resident_nbytes
    assert timeline.seconds == len(order)


def test_steps_beside_a_copy_start_later():
    """A copy of 3 s begins at 1 s: two steps of 1 s begin beside it, each half a second late."""
    b = Builder()
    x = b.input(1)
    parked = b.step([x], 6)
    y = parked
    for _ in range(4):
        y = b.step([x], 1)
    program = b.program([b.step([y, parked], 1)])
    moves = (Transfer(parked, 1, 4, 5, 5),)
    costs = lambda delay: dataclasses.replace(
        unit_costs(program), link=Link(2.0, 1e9, 1e9, delay=delay)
    )
    order = range(len(program.steps))
    prompt, late = (simulate(program, order, costs(delay), moves) for delay in (0.0, 0.5))
    assert prompt.start == pytest.approx((0, 1, 2, 3, 4, 5))
    assert late.start == pytest.approx((0, 1.5, 3, 4, 5, 6))
    assert late.copies[0][0] == prompt.copies[0][0] == Copy(1, pytest.approx(4))
    assert (late.peak, late.seconds) == (prompt.peak, pytest.approx(prompt.seconds + 1))
    still = [simulate(program, order, costs(delay)) for delay in (0.0, 0.5)]
    assert still[0] == still[1]
