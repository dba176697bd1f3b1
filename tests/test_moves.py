"""Transfers on paper: what simulate makes of them, what validate refuses, where they are placed."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import SHAPES, Builder, chain, orders, plan_of, programs, unit_costs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vmem_jax import POLICIES
from vmem_jax.core.costs import Link
from vmem_jax.core.heap import heap_nbytes
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.simulate import live_at, simulate
from vmem_jax.core.validate import live_by_definition, violations
from vmem_jax.policy import Auto, Infeasible
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.offload_choice import candidates, hidden, without_idle_moves
from vmem_jax.policy.recomputation import Recomputation
from vmem_jax.policy.transfer_schedule import schedule_transfers

some = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
CHAIN = chain(8, size=10)  # layers 0-7, loss 8, backward 9-16; buffer 1 + i is layer i's
ORDER = tuple(range(len(CHAIN.steps)))


def costs_of(program, link=10.0):
    return dataclasses.replace(unit_costs(program), link=Link(link, link, 2 * link))


def moved(*transfers):
    return plan_of(CHAIN, ORDER, transfers=transfers)


# -- simulate


def test_a_buffer_that_waits_in_host_memory_takes_none_here():
    transfer = Transfer(buffer=2, start=3, gone=4, fetch=13, back=14)
    plain = simulate(CHAIN, ORDER, costs_of(CHAIN))
    timeline = simulate(CHAIN, ORDER, costs_of(CHAIN), [transfer])
    away = range(transfer.gone, transfer.fetch)
    for p, (with_, without) in enumerate(zip(timeline.live_nbytes, plain.live_nbytes, strict=True)):
        assert without - with_ == (10 if p in away else 0)
    assert 2 in live_at(CHAIN, ORDER, 8) and 2 not in live_at(CHAIN, ORDER, 8, [transfer])
    assert timeline.seconds == plain.seconds and timeline.stalls == (0.0,)


def test_the_compute_lane_waits_for_a_slow_link():
    """10 bytes at 2 a second: 5 seconds out, 5 back, one of each hidden."""
    transfer = Transfer(buffer=2, start=3, gone=4, fetch=13, back=14)
    plain = simulate(CHAIN, ORDER, costs_of(CHAIN))
    timeline = simulate(CHAIN, ORDER, costs_of(CHAIN, link=2.0), [transfer])
    assert timeline.seconds == pytest.approx(plain.seconds + 8)
    assert timeline.stalls == (pytest.approx(8),)
    out, into = timeline.copies[0]
    assert (out.begin, out.end) == (pytest.approx(3), pytest.approx(8))
    assert into.end - into.begin == pytest.approx(5)


def test_there_is_no_transfer_without_a_link():
    with pytest.raises(ValueError, match="no link"):
        simulate(CHAIN, ORDER, unit_costs(CHAIN), [Transfer(2, 3, 4, 13, 14)])


# -- validate


@pytest.mark.parametrize(
    "transfer, words",
    [
        (Transfer(2, 3, 4, 13, 14), None),
        (Transfer(2, 3, 5, 4, 14), "points out of order"),
        (Transfer(2, 1, 4, 13, 14), "before the buffer is made"),
        (Transfer(2, 2, 2, 13, 14), "read at position 2"),
        (Transfer(2, 3, 4, 16, 16), "is read at position"),
        (Transfer(0, 3, 4, 13, 14), "moves an argument or an output"),
        (Transfer(99, 3, 4, 13, 14), "buffer 99 of"),
        (Transfer(2, 3, 4, 13, 99), "points out of order"),
    ],
)
def test_broken_transfers(transfer, words):
    broken = violations(CHAIN, moved(transfer))
    assert broken == [] if words is None else words in " ".join(broken)


def test_two_transfers_of_one_buffer_at_once():
    broken = violations(CHAIN, moved(Transfer(2, 3, 4, 9, 10), Transfer(2, 5, 6, 11, 12)))
    assert any("overlaps another" in line for line in broken)


def test_transfers_need_fences():
    broken = violations(CHAIN, dataclasses.replace(moved(Transfer(2, 3, 4, 13, 14)), fenced=False))
    assert any("without fences" in line for line in broken)


def test_a_plan_with_transfers_is_saved_and_loaded():
    plan = moved(Transfer(2, 3, 4, 13, 14), Transfer(3, 4, 5, 12, 13))
    assert Plan.from_json(plan.to_json()) == plan
    assert "2 buffers moved" in str(plan)


# -- placement


def parks_of(program, base):
    recomputation = Recomputation(program, base)
    return [
        (b, n)
        for b, uses in enumerate(recomputation.uses)
        if not program.is_resident[b] and program.producer[b] >= 0
        for n in range(len(uses) - 1)
        if uses[n + 1] - uses[n] > 1
    ]


@some
@given(data=st.data(), link=st.sampled_from([0.3, 1.0, 10.0, 1e6]))
def test_placed_transfers_are_valid_and_the_peak_is_the_definitions(data, link):
    program = data.draw(programs(pure=True))
    base = data.draw(orders(program, repeats=0))
    costs = costs_of(program, link)
    parks = [park for park in parks_of(program, base) if data.draw(st.booleans())]
    run = Execution(program, costs, base, parks=parks)
    assert sorted(run.order) == sorted(base)  # nothing is recomputed for what is parked
    low = program.resident_nbytes
    high = simulate(program, base, costs).peak
    limit = data.draw(st.integers(low, high))
    timeline = schedule_transfers(program, run.order, run.away, costs, limit)
    plan = plan_of(program, timeline.order, transfers=timeline.transfers)
    assert violations(program, plan) == []
    live = live_by_definition(program, timeline.order, timeline.transfers)
    assert list(timeline.live_nbytes) == live
    assert timeline.peak <= high
    lighter = without_idle_moves(program, timeline, costs, limit)
    assert lighter.peak <= max(timeline.peak, limit)
    assert len(lighter.transfers) <= len(timeline.transfers)


def test_what_is_made_again_beside_another_need_not_come_back():
    b = Builder()
    x = b.input(8)
    parked, dropped = b.step([x], [4, 4])
    other = b.step([x], 4)
    first = b.step([parked, dropped, other], 16)
    second = b.step([first, dropped], 4)  # makes both again
    program = b.program([b.step([second, parked, other], 1)])
    drops, parks = {(dropped, 1), (other, 1)}, {(parked, 1)}
    costs = costs_of(program, 1e6)
    run = Execution(program, costs, range(len(program.steps)), drops, parks=parks)
    assert run.order == [0, 1, 2, 0, 3, 1, 4] and not run.away


def test_what_came_back_and_is_made_again_beside_another_need_not_have_come():
    """Both are read by one step: one is parked and back by then, the other makes it again."""
    b = Builder()
    x = b.input(8)
    parked, dropped = b.step([x], [4, 4])
    other = b.step([b.step([parked, dropped], 4)], 4)
    program = b.program([b.step([b.step([other, parked, dropped], 4), parked], 1)])
    costs = costs_of(program, 1e6)
    run = Execution(program, costs, range(len(program.steps)), {(dropped, 1)}, parks={(parked, 1)})
    assert run.order == [0, 1, 2, 0, 3, 4] and not run.away


@some
@given(data=st.data())
def test_under_a_limit_what_comes_back_is_read(data):
    """What is evicted before it is read did not come back: it waits in host memory on."""
    program = data.draw(programs(pure=True))
    base = range(len(program.steps))
    costs = costs_of(program, 1e6)
    parks = parks_of(program, base)
    peak = simulate(program, base, costs).peak
    limit = data.draw(st.integers(program.resident_nbytes, peak))
    drops = data.draw(st.sets(st.sampled_from(parks))) if parks else set()
    parked = [park for park in parks if park not in drops]
    run = Execution(program, costs, base, drops, limit, parks=parked)
    moves = [Transfer(a.buffer, a.since, a.since, a.until, a.until) for a in run.away]
    moves = [t for t in moves if t.gone < t.fetch]
    plan = plan_of(program, run.order, transfers=tuple(moves))
    assert violations(program, plan) == []
    assert heap_nbytes(program, run.order, moves) > 0
    assert list(simulate(program, run.order, costs, moves).live_nbytes) == live_by_definition(
        program, tuple(run.order), tuple(moves)
    )


@pytest.mark.parametrize("back, broken", [(14, False), (15, True)], ids=["read", "never read"])
def test_what_comes_back_must_be_read(back, broken):
    found = violations(CHAIN, moved(Transfer(2, 3, 4, 13, back)))
    assert any("nothing reads it" in line for line in found) == broken


def test_a_fast_link_hides_and_a_slow_one_does_not():
    parks = parks_of(CHAIN, ORDER)
    for link, stalls in ((1000.0, False), (1.0, True)):
        costs = costs_of(CHAIN, link)
        run = Execution(CHAIN, costs, ORDER, parks=parks)
        timeline = schedule_transfers(CHAIN, run.order, run.away, costs, CHAIN.resident_nbytes + 30)
        assert timeline.transfers and any(s > 0.1 for s in timeline.stalls) == stalls
        assert timeline.peak < simulate(CHAIN, ORDER, costs).peak


def test_what_hides_is_less_on_a_slower_link():
    counts = []
    recomputation = Recomputation(CHAIN, ORDER)
    for link in (1000.0, 8.0, 0.5):
        costs = costs_of(CHAIN, link)
        counts.append(len(hidden(recomputation, costs, candidates(recomputation, costs, 0))))
    assert counts[0] > counts[1] > counts[2] == 0


# -- auto


@pytest.mark.parametrize("shape", SHAPES)
def test_auto_with_a_fast_link_is_never_slower_than_without(shape):
    program = SHAPES[shape]
    low, high = (
        program.resident_nbytes,
        simulate(program, range(len(program.steps)), costs_of(program)).peak,
    )
    costs, reached = costs_of(program, 1e6), 0
    for budget in range(low, high, max((high - low) // 8, 1)):

        def planned(allow, budget=budget):
            outcome = POLICIES["auto"](allow=allow).plan(program, costs, budget)
            return None if isinstance(outcome, Infeasible) else outcome

        alone, both = planned(("order", "recompute")), planned(("order", "recompute", "offload"))
        if both is not None:
            assert violations(program, both) == []
            assert both.predicted_peak <= budget
            assert (alone is None) or both.predicted_seconds <= alone.predicted_seconds
            reached += bool(both.transfers)
        else:
            assert alone is None
    assert reached > 0


def test_auto_waits_for_a_slow_link_where_nothing_else_fits():
    """Every value is read again before it can be back, and the budget asks for moves all the same."""
    slow = costs_of(CHAIN, 0.1)
    assert not candidates(Recomputation(CHAIN, ORDER), slow, 0)
    budget = simulate(CHAIN, ORDER, slow).peak - 20
    plan = POLICIES["auto"](allow=("order", "offload")).plan(CHAIN, slow, budget)
    assert violations(CHAIN, plan) == [] and plan.predicted_peak <= budget and plan.transfers
    assert plan.predicted_seconds > simulate(CHAIN, ORDER, slow).seconds + 100


def test_auto_moves_nothing_for_a_gain_that_nobody_would_see():
    """What moving saves of the time is what decides, wherever the step also fits without."""
    moved = 0
    for program in SHAPES.values():
        costs = costs_of(program, 1e6)
        low, high = (
            program.resident_nbytes,
            simulate(program, range(len(program.steps)), costs).peak,
        )
        for budget in range(low, high, max((high - low) // 8, 1)):
            still = Auto(allow=("order", "recompute")).plan(program, costs, budget)
            if isinstance(still, Infeasible):
                continue
            every = Auto(gain=0.0).plan(program, costs, budget)
            saved = 1 - every.predicted_seconds / still.predicted_seconds
            assert bool(Auto(gain=saved / 2).plan(program, costs, budget).transfers) == (saved > 0)
            assert not Auto(gain=min(2 * saved + 0.01, 1.0)).plan(program, costs, budget).transfers
            moved += saved > 0
    assert moved


def test_auto_moves_nothing_without_a_link_or_leave():
    program = SHAPES["chain"]
    budget = (
        program.resident_nbytes
        + simulate(program, range(len(program.steps)), unit_costs(program)).peak
    ) // 2
    assert not POLICIES["auto"]().plan(program, unit_costs(program), budget).transfers
    fast = costs_of(program, 1e6)
    assert not POLICIES["auto"](allow=("order", "recompute")).plan(program, fast, budget).transfers
    assert POLICIES["auto"]().plan(program, fast, budget).transfers
