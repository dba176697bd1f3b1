"""When values are where: reports and the layout of host memory have it from the events alone."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import Builder, orders, plan_of, programs, unit_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.core import schedule
from vmem_jax.core.costs import Link
from vmem_jax.core.packing import Interval, pack
from vmem_jax.core.parked import parked_spans
from vmem_jax.core.plan import Plan, Transfer, points_at
from vmem_jax.core.program import Kind, Program, idle_intervals
from vmem_jax.core.schedule import actions
from vmem_jax.core.simulate import Timeline, live_at, simulate
from vmem_jax.core.stays import live_by_kind, live_during, stays
from vmem_jax.core.tensor_cache import events_of
from vmem_jax.core.validate import layout_violations, live_by_definition, violations
from vmem_jax.report.explain import explain
from vmem_jax.report.picture import picture
from vmem_jax.rewrite.transfers import layout_of

some = settings(max_examples=40, deadline=None)


def costs_of(program):
    return dataclasses.replace(unit_costs(program), link=Link(10.0, 10.0, 20.0))


@st.composite
def with_hosted(draw: st.DrawFn) -> Program:
    """A random program of which some arguments and results lie in host memory."""
    program = draw(programs(pure=True))
    ends = [b for b in {*program.inputs, *program.outputs} if draw(st.booleans())]
    return dataclasses.replace(program, hosted=tuple(sorted(ends)))


@st.composite
def transfers_of(draw: st.DrawFn, program: Program, order: tuple[int, ...]) -> tuple[Transfer, ...]:
    """Transfers at random points of random gaps of `order`, those of hosted buffers among them."""
    end, found = len(order), []
    points = lambda first, last, n: sorted(draw(st.integers(first, last)) for _ in range(n))
    for gap in idle_intervals(program, order):
        if gap.buffer in program.steps[order[gap.end]].reads and draw(st.booleans()):
            found.append(Transfer(gap.buffer, *points(gap.start + 1, gap.end, 4)))
    for b in sorted(program.streamed_in):
        first = min(p for p, s in enumerate(order) if b in program.steps[s].reads)
        found.append(Transfer(b, 0, 0, *points(0, first, 2)))
    for b in sorted(program.streamed_out):
        made = min(p for p, s in enumerate(order) if b in program.steps[s].writes)
        found.append(Transfer(b, *points(made + 1, end, 2), end, end))
    return tuple(found)


@st.composite
def plans(draw: st.DrawFn, program: Program) -> Plan:
    order = draw(orders(program))
    plan = plan_of(program, order, transfers=draw(transfers_of(program, order)))
    assert violations(program, plan) == []
    return plan


@st.composite
def timelines(draw: st.DrawFn) -> tuple[Program, Plan, Timeline]:
    """A program with hosted buffers, a plan for it, and its simulation."""
    program = draw(with_hosted())
    plan = draw(plans(program))
    return program, plan, simulate(program, plan.order, costs_of(program), plan.transfers)


@some
@given(drawn=timelines())
def test_live_bytes_are_those_of_the_definition(drawn):
    program, plan, timeline = drawn
    by_kind = live_by_kind(program, timeline)
    live = live_by_definition(program, plan.order, plan.transfers)
    assert [sum(now.values()) for now in by_kind] == live == [*timeline.live_nbytes]
    assert all(nbytes >= 0 for now in by_kind for nbytes in now.values())


@some
@given(drawn=timelines())
def test_the_simulator_has_the_same_values_live(drawn):
    program, plan, timeline = drawn
    for position in range(len(plan.order)):
        assert live_during(program, timeline, position) == live_at(
            program, plan.order, position, plan.transfers
        )


def test_a_hosted_argument_is_there_while_it_is_read():
    b = Builder()
    moments, x = b.input(8, Kind.BATCH), b.input(1)
    y = b.step([x], 1)
    z = b.step([y, moments], 1)
    program = b.program([b.step([b.step([z], 1)], 1)])
    program = dataclasses.replace(program, hosted=(moments,))
    plan = plan_of(program, range(4), transfers=(Transfer(moments, 0, 0, 1, 1),))
    [stay] = [
        each
        for each in stays(program, actions(program, plan.order, plan.transfers))
        if each.buffer == moments
    ]
    assert (stay.first, stay.last) == (1, 1)
    about = explain(program, costs_of(program), plan, budget=None, plain_need=1, compiled_need=1)
    shown = picture(program, costs_of(program), about)["values"]
    [row] = [row for row in shown if row["label"] == program.buffers[moments].label]
    start = about.timeline.start
    assert row["decision"] == "moved" and row["spans"] == [(start[1], start[2])]


# -- nothing but the events says when


@some
@given(data=st.data())
def test_the_layout_has_the_intervals_of_the_events(data):
    program = data.draw(programs(pure=True))
    plan = data.draw(plans(program))
    began: dict[int, int] = {}
    held = {}
    for event in schedule.schedule(program, plan.order, plan.transfers):
        if event.do is schedule.Do.START:
            began[event.index] = event.position
        elif event.do is schedule.Do.BACK:
            nbytes = program.buffers[event.buffers[0]].nbytes
            held[event.index] = Interval(nbytes, began[event.index], event.position)
    found = layout_of(program, plan)
    packing = pack([held[i] for i in range(len(plan.transfers))])
    assert [slot.offset for slot in found.slots] == [*packing.offsets]
    assert found.nbytes == packing.nbytes
    extents = [(slot.offset, slot.offset + slot.stride) for slot in found.slots]
    assert layout_violations(program, plan, extents) == []


@some
@given(data=st.data())
def test_where_events_say_otherwise_all_that_reads_them_follows(data):
    """The plan's transfers are those of another plan, as far as `schedule` knows."""
    program = data.draw(programs(pure=True))
    plan = data.draw(plans(program))
    moved = lambda t: Transfer(
        t.buffer, *sorted(data.draw(st.integers(t.start, t.back)) for _ in range(4))
    )
    other = dataclasses.replace(plan, transfers=tuple(map(moved, plan.transfers)))
    costs = costs_of(program)
    timeline = simulate(program, plan.order, costs, plan.transfers)
    told = lambda about: (
        parked_spans(program, about),
        layout_of(program, about),
        live_by_kind(program, dataclasses.replace(timeline, transfers=about.transfers)),
        [*events_of(program, about)],
    )
    expected = told(other)
    ends = [*timeline.start[1:], timeline.seconds]
    spans: dict[str, list] = {}
    for stay in stays(program, actions(program, plan.order, other.transfers)):
        label = program.buffers[stay.buffer].label
        spans.setdefault(label, []).append((timeline.start[stay.first], ends[stay.last]))
    of_other = lambda program, own: points_at(program, other.transfers if own else ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "points_at", of_other)
        assert told(plan) == expected
        about = explain(program, costs, plan, budget=None, plain_need=1, compiled_need=1)
        for row in picture(program, costs, about)["values"]:
            if row["decision"] != "held throughout":
                assert row["spans"] == spans[row["label"]]
