"""moDNN on the examples of its paper: the task graph, what leaves, what is fetched, what computes."""

from __future__ import annotations

import pytest
from helpers import BACKWARD, FORWARD, Builder, unit_costs
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import CONV, Spec, network, with_algorithms

from vmem_jax import MoDNN
from vmem_jax.core.convolution import XLA
from vmem_jax.core.costs import Costs, Link
from vmem_jax.core.planned import planned_program, simulate_plan
from vmem_jax.core.program import Kind
from vmem_jax.core.validate import peak_by_definition, violations
from vmem_jax.policy import Infeasible
from vmem_jax.policy.modnn import (
    _Schedule,
    minimum_peak,
    offloads_end,
    prefetch_is_due,
    schedule,
)
from vmem_jax.policy.segments import Segment, Segments


def planned(program, costs, budget):
    plan = MoDNN().plan(program, costs, budget)
    assert violations(program, plan) == []
    timeline = simulate_plan(program, plan, costs)
    peak = peak_by_definition(planned_program(program, plan), plan.order, plan.transfers)
    assert timeline.peak == plan.predicted_peak == peak
    assert budget is None or peak <= budget
    return plan


def figure_1():
    """The graph of a CONV-pooling-CONV-fully connected network, as drawn; the names of its tasks.

    BP1(l) makes δ_l, BP2(l) the gradient of W_l; a pool has no weights. Layer 4's Y begins the way
    back.
    """
    b = Builder()
    x = b.input(8, Kind.BATCH)
    w = {n: b.input(1) for n in (1, 3, 4)}
    names, y, size = {}, {0: x}, {1: 4, 2: 4, 3: 8, 4: 8}

    def task(name, reads, nbytes, phase, op):
        names[name] = len(b.steps)
        return b.step(reads, nbytes, phase, op=op)

    ops = {1: "conv_general_dilated", 2: "reduce_window_max", 3: "conv_general_dilated"}
    for n in range(1, 5):
        reads = [y[n - 1], *([w[n]] if n in w else [])]
        y[n] = task(f"FP({n})", reads, size[n], FORWARD, ops.get(n, "dot_general"))
    delta, gradients = y[4], []
    for n in range(4, 0, -1):
        op = ops.get(n, "dot_general")
        if n in w:
            gradients.append(task(f"BP2({n})", [delta, y[n - 1]], 1, BACKWARD, op))
        if n > 1:
            reads = [delta, *([w[n]] if n in w else [y[n - 1], y[n]])]
            delta = task(f"BP1({n})", reads, size[n - 1], BACKWARD, op)
    return b.program(gradients), names


def test_figure_1_weights_stay_and_feature_maps_and_derivatives_may_leave():
    program, names = figure_1()
    costs = Costs("drawn", (1.0,) * len(program.steps), Link(100.0, 100.0, 200.0))
    order = range(len(program.steps))
    lowest = minimum_peak(program, costs, order)
    # BP1(2) takes δ3, Y1 and Y2, and makes δ2
    assert lowest == program.resident_nbytes + 4 * 4
    plan = planned(program, costs, lowest)
    moved = {t.buffer for t in plan.transfers}
    assert moved and not any(program.is_resident[b] for b in moved)
    assert plan.order.index(names["BP1(4)"]) < plan.order.index(names["BP1(3)"])


def test_figure_3_a_copy_delays_only_by_what_is_left_of_it():
    # the block was made at 4 and takes 3 seconds; its lane is free, or at 8
    assert offloads_end(0.0, [4.0], [3.0], [(0, 1)]) == [7.0]
    assert offloads_end(8.0, [4.0], [3.0], [(0, 1)]) == [11.0]


@given(st.data(), st.integers(1, 12))
def test_the_copies_of_a_stretch_follow_one_another(data, count):
    times = st.lists(st.integers(0, 20), min_size=count, max_size=count)
    made, seconds, free = data.draw(times), data.draw(times), data.draw(st.integers(0, 20))
    ranges = data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(1, count))))
    firsts, ends = (sorted(each) for each in zip(*ranges, strict=True)) if ranges else ((), ())
    stretches = [(f, e) for f, e in zip(firsts, ends, strict=True) if f < e]
    one_by_one = []
    for first, end in stretches:
        now = free
        for n in range(first, end):
            now = max(now, made[n]) + seconds[n]
        one_by_one.append(now)
    assert offloads_end(free, made, seconds, stretches) == one_by_one


def test_figure_4_two_schemes_past_a_block_that_stays():
    """An allocation of 4: (1)(2) or (5)(6); (4) is not allowed to leave. The sizes are ours."""
    memory = Segments(11)
    for key, nbytes in ((1, 2), (2, 2), (3, 1), (4, 2), (5, 2), (6, 2)):
        assert memory.allocate(key, nbytes)
    assert not memory.allocate(7, 4)
    assert memory.schemes(4, lambda key: key != 4) == ([1, 2, 3, 5, 6], [(0, 2), (3, 5)])
    assert memory.schemes(8, lambda key: key != 4)[1] == []
    memory.free(1)
    memory.free(2)
    assert memory.segments[0] == Segment(4)
    assert memory.allocate(7, 4)


def test_segments_beside_free_ones_count_and_packing_leaves_one():
    memory = Segments(10)
    for key in range(5):
        memory.allocate(key, 2)
    memory.free(1)
    memory.free(3)
    assert memory.free_nbytes == 4 and not memory.allocate(9, 3)
    assert memory.schemes(4, lambda key: True) == ([0, 2, 4], [(0, 1), (1, 2), (2, 3)])
    memory.hand_over(2, 7)
    memory.pack([0, 7])
    assert memory.segments == (Segment(2, 0), Segment(2, 7), Segment(6))


@pytest.mark.parametrize(
    "now, task, transfers, expected, due",
    [
        (0.0, 2.0, [3.0], 10.0, False),  # after the next task there is still time
        (0.0, 2.0, [3.0], 5.0, False),  # just enough
        (0.0, 2.0, [3.0], 4.0, True),  # the task would wait for a second
        (0.0, 2.0, [2.0, 1.0], 4.0, True),  # all that it reads together
        (1.0, 2.0, [1.0], 4.0, False),
    ],
)
def test_figure_5_and_equation_4(now, task, transfers, expected, due):
    assert prefetch_is_due(now, task, transfers, expected) is due


CHAIN = network([Spec("other", 8), *[CONV] * 6])


def test_figure_5_a_fetch_begins_as_late_as_it_may():
    """Each step takes 1 second and each transfer 1.6: a fetch begins two tasks before it is read."""
    costs = CHAIN.costs({}, rate=5.0)
    free = MoDNN().plan(CHAIN.program, costs, None).predicted_peak
    plan = planned(CHAIN.program, costs, free - 8)
    assert [t.back - t.fetch for t in plan.transfers] == [2]


def test_nothing_moves_where_all_fits_and_little_where_little_is_missing():
    costs = CHAIN.costs({}, rate=100.0)
    free = planned(CHAIN.program, costs, None).predicted_peak
    moved = []
    for missing in (0, 8, 16, 24):
        plan = planned(CHAIN.program, costs, free - missing)
        moved.append(len({t.buffer for t in plan.transfers}))
    assert moved[0] == 0 and moved == sorted(moved) and moved[1] == 1


def test_criterion_b_what_was_just_made_does_not_leave():
    """Of two blocks as large, the one that no task has used yet stays."""
    b = Builder()
    x = b.input(1, Kind.BATCH)
    fresh = b.step([b.step([x], 9)], 8)  # no later than here, or the 9 bytes would stay
    used = b.step([x], 8)
    small = b.step([used], 1)
    large = b.step([small], 8)
    tip = b.step([large], 1)
    program = b.program([b.step([tip, fresh, used], 1, BACKWARD)])
    costs = Costs("drawn", (1.0,) * 7, Link(100.0, 100.0, 200.0))
    plan = planned(program, costs, 2 + 1 + 8 + 8)
    assert [t.buffer for t in plan.transfers] == [used]


def with_a_residual(reads_late: int):
    """A residual that the backward pass alone reads, after `reads_late` small tasks; of what else
    idles one is in use by then, and one small block is too small for what is allocated."""
    b = Builder()
    x = b.input(1, Kind.BATCH)
    small, residual = b.step([x], 1), b.step([x], 8)
    tip = b.step([b.step([small], 1)], 8)
    for _ in range(reads_late):
        tip = b.step([tip], 1)
    return b.program([b.step([tip, small, residual], 1, BACKWARD)]), residual, small


@pytest.mark.parametrize("rate, moved", [(4.0, "residual"), (1.5, "both")])
def test_a_residual_leaves_where_it_would_be_back_before_it_is_read(rate, moved):
    """By the rule of equation 4. Where it would not be, everything leaves: a defragmentation."""
    program, residual, small = with_a_residual(6)
    costs = Costs("drawn", (1.0,) * len(program.steps), Link(rate, rate, 2 * rate))
    budget = program.resident_nbytes + 1 + 8 + 4
    timeline, _ = schedule(program, costs, range(len(program.steps)), budget)
    assert timeline.peak <= budget
    expected = {residual} if moved == "residual" else {residual, small}
    assert {t.buffer for t in timeline.transfers} == expected


SPECS = st.sampled_from([Spec("conv", 8), Spec("conv", 5), Spec("act", 3), Spec("pool", 2)])


@settings(max_examples=150, deadline=None)
@given(st.lists(SPECS, min_size=3, max_size=9), st.floats(0.5, 20.0), st.floats(0.0, 1.0))
def test_it_is_never_slower_than_with_criterion_b_to_the_letter(specs, rate, share):
    net = network([Spec("other", 8), *specs])
    costs, order = net.costs({}, rate=rate), range(len(net.program.steps))
    free = simulate_plan(net.program, MoDNN().plan(net.program, costs, None), costs).peak
    low = minimum_peak(net.program, costs, order)
    budget = low + int(share * (free - low))
    letter = _Schedule(net.program, costs, order, budget, late=False).run()
    found = schedule(net.program, costs, order, budget)
    assert letter is None or found[0].seconds <= letter[0].seconds
    if found is not None:
        assert found[0].peak <= budget


def test_the_lower_bound_is_reached():
    """Equation 2 for the whole batch, and nothing fits just below it."""
    costs = CHAIN.costs({}, rate=100.0)
    lowest = minimum_peak(CHAIN.program, costs, range(len(CHAIN.program.steps)))
    assert lowest == CHAIN.program.resident_nbytes + 3 * 8
    assert planned(CHAIN.program, costs, lowest).predicted_peak == lowest
    outcome = MoDNN().plan(CHAIN.program, costs, lowest - 1)
    assert isinstance(outcome, Infeasible) and outcome.minimum_peak == lowest


def test_defragmentation_where_no_stretch_is_large_enough():
    """What may not leave lies in the middle: all else leaves, and the allocation finds room."""
    b = Builder()
    x = b.input(1, Kind.BATCH)
    first, middle, last = b.step([x], 4), b.step([x], 2), b.step([x], 4)
    touch = b.step([first, last, middle], 1)
    large = b.step([middle, touch], 8)  # `middle` is needed, and lies between the others
    tip = b.step([large], 1)
    program = b.program([b.step([tip, first, middle, last], 1, BACKWARD)])
    costs = Costs("drawn", (1.0,) * 7, Link(100.0, 100.0, 200.0))
    tight = 2 + 2 + 1 + 8
    plan = planned(program, costs, tight)
    assert {t.buffer for t in plan.transfers} == {first, last}


def engines(net, costs, budget):
    plan = planned(net, costs, budget)
    return [way.micros[0].engine for _, way in plan.convolutions]


def test_equation_5_the_gain_of_an_algorithm_against_what_must_leave_for_it():
    """4 seconds at most are gained: worth it where a copy takes less, and not where it takes more."""
    quick, slow = (with_algorithms(CHAIN.program, CHAIN.costs({}, rate=r)) for r in (100.0, 0.1))
    free = planned(*quick, None).predicted_peak
    assert engines(*quick, free) == [XLA] * 6
    least = minimum_peak(*quick, range(len(CHAIN.program.steps)))
    budget = least + 32  # one workspace of 30 beside the least
    assert engines(*quick, budget).count(XLA) > engines(*slow, budget).count(XLA)


def test_without_a_link():
    program = CHAIN.program
    outcome = MoDNN().plan(program, unit_costs(program), program.resident_nbytes + 24)
    assert isinstance(outcome, Infeasible)
