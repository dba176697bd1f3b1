"""The heap: as XLA places buffers, by a slow version of the same; and never below what is live."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import BACKWARD, Builder, programs, unit_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.core import schedule
from vmem_jax.core.convolution import Convolution, Pass
from vmem_jax.core.fences import Fence
from vmem_jax.core.heap import best_fit_nbytes, elsewhere, heap_nbytes, intervals, merged
from vmem_jax.core.packing import Interval, pack
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import BEGIN, END
from vmem_jax.core.simulate import simulate


def taken_over_at(one, *shares):
    """`one`, whose slot other values take over on the way."""
    span = one.last - one.first
    handed = sorted({one.first + 1 + share * (span - 1) // 8 for share in shares if span})
    return dataclasses.replace(one, handed=tuple(handed))


some_intervals = st.lists(
    st.builds(
        lambda nbytes, first, span, shares: taken_over_at(
            Interval(nbytes, first, first + span), *shares
        ),
        st.integers(0, 9),
        st.integers(0, 30),
        st.integers(0, 15),
        st.lists(st.integers(0, 8), max_size=2),
    ),
    max_size=24,
)


def ticks(parked):
    """When each begins, is first taken over or freed, and is freed, as XLA's heap simulator counts:
    at each position what begins there, then what ends."""
    clock, begin, first, end = 0, {}, {}, {}
    for position in range(max((one.last for one in parked), default=-1) + 1):
        for i, one in enumerate(parked):
            if one.first == position:
                begin[i] = clock
                clock += 1
            elif position in one.handed:
                first.setdefault(i, clock)
                clock += 2
        for i, one in enumerate(parked):
            if one.last == position:
                end[i] = clock
                first.setdefault(i, clock)
                clock += 1
    return begin, first, end


def placed_one_by_one(parked, key):
    """The top of the heap, every address tried for each that follows by `key`."""
    places = []
    for one in sorted(parked, key=key):
        taken = {a for o, at in places if o.meets(one) for a in range(at, at + o.nbytes)}
        top = max(taken, default=-1) + 1
        gaps, begin = [], 0
        for address in range(top + 1):
            if address in taken or address == top:
                gaps += [(address - begin, begin)] if address > begin else []
                begin = address + 1
        at = min(((n, a) for n, a in gaps if n >= one.nbytes), default=(0, top))[1]
        places.append((one, at))
    return max((at + o.nbytes for o, at in places), default=0)


@given(some_intervals.filter(lambda found: all(i.nbytes for i in found)))
def test_each_goes_into_the_smallest_gap(parked):
    begin, first, end = ticks(parked)
    at = {id(one): i for i, one in enumerate(parked)}
    own = lambda one: first[at[id(one)]] - begin[at[id(one)]]
    span = lambda one: end[at[id(one)]] - begin[at[id(one)]]
    since = lambda one: begin[at[id(one)]]
    by_size = placed_one_by_one(parked, lambda i: (-i.nbytes, -own(i), since(i)))
    by_span = placed_one_by_one(parked, lambda i: (-span(i), -i.nbytes, since(i)))
    assert best_fit_nbytes(parked) == min(by_size, by_span)


def test_lives_in_a_row_leave_a_gap():
    """Two are live at once. The two that live longest are placed first, on one floor: then the one
    between them, which meets both, and the small one, which meets two on two floors."""
    parked = [Interval(2, 0, 1), Interval(2, 6, 10), Interval(1, 2, 6), Interval(1, 0, 2)]
    assert pack(parked, alignment=1).nbytes == 3 and best_fit_nbytes(parked) == 4


def test_what_is_taken_over_counts_as_long_as_its_first_value_lives():
    """In the order by size; so the third is placed behind the one that it would go in front of."""
    parked = [Interval(2, 0, 3), Interval(2, 5, 9), Interval(1, 4, 8), Interval(1, 3, 4)]
    taken = [dataclasses.replace(parked[0], handed=(2,)), *parked[1:]]
    assert best_fit_nbytes(parked) != best_fit_nbytes(taken)


def test_no_lives_take_nothing():
    assert best_fit_nbytes([]) == 0


@settings(max_examples=50, deadline=None)
@given(programs())
def test_no_heap_is_smaller_than_what_is_live(program):
    order = range(len(program.steps))
    peak = simulate(program, order, unit_costs(program)).peak
    assert heap_nbytes(program, order) >= peak


def test_what_is_away_leaves_its_place():
    b = Builder()
    x = b.input(1)
    early = b.step([x], 8)
    late = b.step([x], 8)
    more = b.step([late], 8)
    program = b.program([b.step([b.step([more], 1), early], 1)])
    order = range(5)
    assert heap_nbytes(program, order) == program.resident_nbytes + 24
    away = [Transfer(early, 1, 1, 4, 4)]
    assert heap_nbytes(program, order, away) == program.resident_nbytes + 16
    assert sorted(i.nbytes for i in intervals(program, order, away)) == [1, 8, 8, 8, 8]


def test_what_takes_over_memory_has_no_place_of_its_own():
    for in_place, nbytes in ((True, 8), (False, 16)):
        b = Builder()
        made = b.step([b.input(1)], 8)
        last = b.step([b.step([made], 8, in_place=in_place)], 1)
        program = b.program([last])
        assert heap_nbytes(program, range(3)) == program.resident_nbytes + nbytes


@pytest.mark.parametrize("fusible, nbytes", [(True, 16), (False, 8)])
def test_nothing_is_written_over_what_is_read_through_a_barrier(monkeypatch, fusible, nbytes):
    """But for what is updated where it lies, a scatter for instance."""
    b = Builder()
    made = b.step([b.input(1)], 8)
    last = b.step([b.step([made], 8, in_place=True, fusible=fusible)], 1)
    program = b.program([last])
    monkeypatch.setattr(schedule, "fences", lambda program, order, **_: (Fence(1, (made,)),))
    assert heap_nbytes(program, range(3)) == program.resident_nbytes + nbytes


def test_the_barriers_of_a_transfer_hold_what_runs_beside_it():
    b = Builder()
    x = b.input(1)
    parked, made = b.step([x], 4), b.step([x], 8)
    over = b.step([made], 8, in_place=True, fusible=True)
    program = b.program([b.step([over, parked], 1)])
    assert heap_nbytes(program, range(4)) == program.resident_nbytes + 4 + 8
    away = [Transfer(parked, 1, 2, 3, 3)]  # gone where `made` is read
    assert heap_nbytes(program, range(4), away) == program.resident_nbytes + 8 + 8


def test_an_argument_is_padded_once_for_all_convolutions():
    """The first and the last have the copy in their workspaces."""
    convolution = Convolution(
        Pass.FORWARD, "float32", False, 2, 4, 8, (8, 8), (3, 3), (2, 2), ((0, 1), (0, 1)), (1, 1)
    )
    b = Builder()
    x = b.input(convolution.x_nbytes)
    first = b.step([x], 3, op="conv_general_dilated")
    last = b.step([b.step([first], 3), x], 3, op="conv_general_dilated")
    program = b.program([last])
    steps = [
        dataclasses.replace(step, convolution=convolution) if x in step.reads else step
        for step in program.steps
    ]
    program = dataclasses.replace(program, steps=tuple(steps))
    assert Interval(convolution.padded_nbytes, 1, 1) in intervals(program, range(3))


def test_a_filter_is_transposed_once_and_kept_for_the_backward_pass():
    """The copy is there from the convolution to the one that reads it reversed, however often the
    first of them runs; the reversed filter is no other one."""
    conv, rev = "conv_general_dilated", "rev"
    b = Builder()
    x, w = b.input(1), b.input(8)
    y = b.step([x, w], 4, op=conv)
    loss = b.step([y], 2)
    turned = b.step([w], 8, op=rev)
    program = b.program([b.step([b.step([loss, turned], 2, op=conv)], 1)])
    assert sorted(intervals(program, range(5)), key=lambda i: -i.nbytes)[0] == Interval(8, 0, 3)
    assert heap_nbytes(program, range(5)) == program.resident_nbytes + 8 + 4 + 2
    again = intervals(program, (0, 0, 1, 2, 3, 4))
    assert [i for i in again if i.nbytes == 8] == [Interval(8, 0, 4)]


def trained(filters, largest=1, **layer):
    """Layers that each read their own filter of 8 bytes, which its gradient updates in its place. The
    third one makes `largest` bytes, the others one."""
    conv = "conv_general_dilated"
    b = Builder()
    x, ws = b.input(1), [b.input(8) for _ in range(filters)]
    ys = [x]
    for i, w in enumerate(ws):
        ys.append(b.step([ys[-1], w], largest if i == 2 else 1, op=conv))
    new = []
    dy = b.step([ys[-1]], 1)
    for w, y in zip(reversed(ws), reversed(ys[:-1]), strict=True):
        gradient = b.step([y, dy], 8, op=conv)
        turned = b.step([w], 8, op="rev")
        dy = b.step([dy, turned], 1, op=conv)
        new.insert(0, b.step([w, gradient], 8))
    program = b.program([*new, dy], aliases=tuple(zip(ws, new, strict=True)))
    if not layer:
        return program
    sizes = {"kernel": (3, 3), "size": (8, 8), "padding": ((1, 1), (1, 1)), **layer}
    convolution = Convolution(
        Pass.FORWARD, "float32", False, 1, 1, 1, strides=(1, 1), dilation=(1, 1), **sizes
    )
    steps = [
        dataclasses.replace(step, convolution=convolution) if {*step.reads} & {*ws} else step
        for step in program.steps
    ]
    return dataclasses.replace(program, steps=tuple(steps))


def copies(program, early=False):
    """The copies of five filters that take memory of their own, by when they are made."""
    order = range(len(program.steps))
    found = [i for i in intervals(program, order, early=early) if i.nbytes == 8]
    return sorted((i for i in found if i.first < 5), key=lambda i: i.first)


@pytest.mark.parametrize("layer", [{}, {"kernel": (3, 3)}])
def test_the_copy_of_a_filter_lies_where_the_one_before_was(layer):
    """It is the copy that is updated, so the place of a donated filter is free until the end."""
    donated = trained(5, **layer)
    end = len(donated.steps) - 1
    assert copies(donated) == [Interval(8, 0, end)]
    kept = copies(dataclasses.replace(donated, aliases=()))
    assert [i.first for i in kept] == [*range(5)] and kept[1].last < end


def test_a_filter_that_is_read_itself_keeps_its_place():
    """One of a single element in space until it was read backwards, and one as large as its result,
    of which the copy goes then."""
    flat = copies(trained(5, kernel=(1, 1), padding=((0, 0), (0, 0))))
    assert len(flat) == 5 and {i.last for i in flat} == {len(trained(5).steps) - 1}
    kept = trained(5, size=(3, 3))
    assert [kept.steps[i.last].reads[1:] for i in copies(kept)] == [
        (step.writes[0],) for step in kept.steps[::-1] if step.op == "rev"
    ]


def stated(program):
    """`program` whose gradients to filters are stated to be row-major."""
    gradients = {step.reads[1] for step in program.steps if {*step.writes} & {*program.outputs}}
    steps = [
        dataclasses.replace(step, row_major=not gradients.isdisjoint(step.writes))
        for step in program.steps
    ]
    assert any(step.row_major for step in steps)
    updates = [
        dataclasses.replace(step, fusible=not {*program.outputs}.isdisjoint(step.writes))
        for step in steps
    ]
    return dataclasses.replace(program, steps=tuple(updates))


def test_a_filter_whose_gradient_is_row_major_keeps_its_place_beside_its_copy():
    program = trained(5, kernel=(3, 3))
    found = copies(stated(program))
    assert [i.first for i in found] == [*range(5)]  # and each goes with the last that reads it
    assert [program.steps[i.last].op for i in found] == ["conv_general_dilated"] * 5


@pytest.mark.parametrize("largest, made", [(7, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 2, 2])])
def test_list_scheduling_transposes_filters_in_front_of_what_makes_memory_grow_more(largest, made):
    """Those that stay beside their copies; of the others one copy lies where another filter was."""
    program = trained(5, largest, kernel=(3, 3))
    assert [i.first for i in copies(stated(program), early=True)] == made
    assert copies(program, early=True) == copies(program)


def test_the_filters_of_sub_batches_are_transposed_before_the_loop():
    conv = "conv_general_dilated"
    b = Builder()
    x, w = b.input(1), b.input(8)
    begun = b.step([x], 1, op=BEGIN)
    y = b.step([begun, w], 4, op=conv)
    turned = b.step([w], 8, op="rev")
    dx = b.step([b.step([y, turned], 2, op=conv)], 1)
    program = b.program([b.step([dx], 1, op=END)])
    assert [i for i in intervals(program, range(6)) if i.nbytes == 8] == [Interval(8, 0, 5)]


def test_a_filter_that_several_layers_share_is_transposed_once():
    conv = "conv_general_dilated"
    b = Builder()
    x, w = b.input(1), b.input(8)
    y = b.step([b.step([x, w], 1, op=conv), w], 1, op=conv)
    for _ in range(2):
        y = b.step([y, b.step([w], 8, op="rev")], 1, op=conv)
    assert [i for i in intervals(b.program([y]), range(6)) if i.nbytes == 8] == [Interval(8, 0, 5)]


def test_what_is_small_lies_in_a_place_that_is_free():
    places_ = [Interval(8, 2, 9), Interval(4, 0, 9)]
    inside, too_early, beside = Interval(3, 3, 5), Interval(8, 1, 4), Interval(4, 4, 7)
    assert elsewhere([inside, too_early, beside], places_) == [too_early]
    assert elsewhere([inside, beside, Interval(2, 5, 5)], places_) == [Interval(2, 5, 5)]


def test_a_hosted_buffer_takes_room_while_it_is_here():
    b = Builder()
    x, p = b.input(4), b.input(8)
    made = b.step([x], 2)
    out = b.step([made, p], 1)
    program = dataclasses.replace(b.program([out]), hosted=(p,))
    assert heap_nbytes(program, range(2)) == program.resident_nbytes + 8 + 2


def test_what_one_kernel_makes_is_there_with_all_that_it_reads():
    """Of a gated layer's backward pass, whose two cotangents XLA makes in one kernel."""
    b = Builder()
    x = b.input(64)
    gate, up = b.step([x], 64), b.step([x], 64)
    back = b.step([gate, up], 64, BACKWARD)
    first = b.step([gate, up, back], 64, BACKWARD, fusible=True)
    product = b.step([first], 8, BACKWARD)
    second = b.step([gate, back], 64, BACKWARD, fusible=True)
    program = b.program([b.step([second, product], 8, BACKWARD)])
    steps = list(program.steps)
    steps[3] = dataclasses.replace(steps[3], equations=(3, 3))  # of several operations
    program = dataclasses.replace(program, steps=tuple(steps))
    order = range(len(steps))
    run = [*schedule.actions(program, order)]  # without barriers
    assert merged(program, run) == {5: 3}
    barrier = schedule.Event(schedule.Do.BARRIER, 5, buffers=(back,))
    apart = [*(e for e in run if e.position < 5), barrier, *(e for e in run if e.position >= 5)]
    assert merged(program, apart) == {}
    need = lambda events: best_fit_nbytes(intervals(program, order, events=events))
    assert need(run) == 5 * 64 and need(apart) == 4 * 64
