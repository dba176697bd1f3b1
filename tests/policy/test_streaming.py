"""Hosted inputs and outputs: the plans of every policy stream them; simulate and validate agree."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import BACKWARD, UPDATE, Builder, plan_of, programs
from hypothesis import given
from hypothesis import strategies as st

from vmem_jax.core.costs import Costs, Link
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import Kind
from vmem_jax.core.simulate import live_at, simulate
from vmem_jax.core.validate import check_program, peak_by_definition, violations
from vmem_jax.policy import POLICIES, Exact, Infeasible
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.streaming import Streaming

FAST, SLOW = Link(1e9, 1e9, 2e9), Link(1.0, 1.0, 2.0)


def momentum(layers: int, size: int = 8):
    """A chain whose layers have a parameter and a hosted moment each, all donated."""
    b = Builder()
    weights = [b.input(size) for _ in range(layers)]
    moments = [b.input(size, Kind.OPTIMISER) for _ in range(layers)]
    values = [b.input(size, Kind.BATCH)]
    for w in weights:
        values.append(b.step([values[-1], w], size))
    cotangent = b.step([values[-1]], size)
    new_weights, new_moments = [], []
    for i in reversed(range(layers)):
        gradient = b.step([cotangent, values[i]], size, BACKWARD)
        cotangent = b.step([cotangent, weights[i]], size, BACKWARD)
        new_moments.append(b.step([gradient, moments[i]], size, UPDATE, fusible=True))
        new_weights.append(b.step([weights[i], new_moments[-1]], size, UPDATE, fusible=True))
    aliases = list(zip(reversed(weights), new_weights, strict=True))
    program = b.program([*new_weights, *new_moments], aliases)
    return dataclasses.replace(program, hosted=tuple(sorted((*moments, *new_moments))))


def costs(program, link=None):
    return Costs("unit", (1.0,) * len(program.steps), link)


def check(program, plan, link):
    assert violations(program, plan) == []
    timeline = simulate(program, plan.order, costs(program, link), plan.transfers)
    assert timeline.peak == plan.predicted_peak
    assert timeline.peak == peak_by_definition(program, plan.order, plan.transfers)
    return timeline


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
def test_every_policy_streams_what_is_hosted(name, link):
    program = momentum(8)
    assert check_program(program) == []
    everything = sum(program.buffers[b].nbytes for b in {*program.inputs, *program.outputs})
    assert program.resident_nbytes == everything - 24 * 8  # moments old and new, updated weights
    plan = Streaming(POLICIES[name](), link).plan(program, costs(program), None)
    assert plan.policy == name and plan.fenced
    assert sorted(t.buffer for t in plan.transfers) == sorted(program.hosted)
    timeline = check(program, plan, link)
    assert (sum(timeline.stalls) > 1) == (link is SLOW)
    comes = [t for t in plan.transfers if t.buffer in program.streamed_in]
    leaves = [t for t in plan.transfers if t.buffer in program.streamed_out]
    assert all(t.start == t.gone == 0 for t in comes) and len(comes) == 8
    assert all(t.fetch == t.back == len(plan.order) for t in leaves) and len(leaves) == 8
    if link is FAST:  # just in time, not all at the start
        assert all(t.fetch > 8 for t in comes)


@pytest.mark.parametrize("name", ["auto", "recompute"])
def test_the_budget_holds_with_what_is_on_its_way(name):
    program = momentum(8)
    free = Streaming(POLICIES[name](), FAST).plan(program, costs(program), None)
    lowest = None
    for budget in range(free.predicted_peak, program.resident_nbytes, -8):
        found = Streaming(POLICIES[name](), FAST).plan(program, costs(program), budget)
        if isinstance(found, Infeasible):
            assert found.minimum_peak > budget
            assert violations(program, found.plan) == []  # is compiled, so it streams as well
            break
        check(program, found, FAST)
        assert found.predicted_peak <= budget == found.budget
        least = Streaming(POLICIES[name](), FAST).lower_bound_seconds(
            program, costs(program), budget
        )
        assert least <= found.predicted_seconds * (1 + 1e-6)
        lowest = found.predicted_peak
    # the moments would not all have fitted
    assert lowest is not None and lowest < program.resident_nbytes + 8 * 16


def test_the_updates_are_made_where_their_gradients_are():
    """So moments come and go one after another, and are never on the device all at once."""
    program = momentum(8)
    plan = Streaming(Exact(), FAST).plan(program, costs(program), None)
    at_once = [
        len(set(live_at(program, plan.order, p, plan.transfers)) & set(program.hosted))
        for p in range(len(plan.order))
    ]
    assert 2 <= max(at_once) <= 4


def test_hosted_buffers_have_more_time_than_the_rate_of_the_link_requires():
    """XLA starts their copies later than the plan lets it."""
    program = momentum(100)
    plan = Streaming(Exact(), FAST).plan(program, costs(program), None)
    timeline = check(program, plan, FAST)
    begins = (*timeline.start, timeline.seconds)
    lead = PARAMS.stream_lead * timeline.seconds
    assert lead > 2  # steps
    for t in plan.transfers:
        if t.buffer in program.streamed_in:
            assert begins[t.back] - begins[t.fetch] >= lead
        else:
            assert begins[t.gone] - begins[t.start] >= min(lead, begins[-1] - begins[t.start])


BROKEN = {
    "has 0 transfers": lambda ts, n: ts[1:],
    "has 2 transfers": lambda ts, n: (ts[0], *ts),
    "before it is first read": lambda ts, n: (dataclasses.replace(ts[0], fetch=n, back=n), *ts[1:]),
    "after it is made": lambda ts, n: (*ts[:-1], Transfer(ts[-1].buffer, 1, 1, n, n)),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_plan_that_does_not_stream_is_not_valid(message):
    program = momentum(3)
    plan = Streaming(Exact(), FAST).plan(program, costs(program), None)
    transfers = sorted(plan.transfers, key=lambda t: (t.buffer in program.streamed_out, t.buffer))
    broken = BROKEN[message](tuple(transfers), len(plan.order))
    found = violations(program, dataclasses.replace(plan, transfers=broken))
    assert len(found) == 1 and message in found[0]


def test_a_plan_is_not_for_the_same_step_with_its_state_on_the_device():
    program = momentum(3)
    assert program.fingerprint != dataclasses.replace(program, hosted=()).fingerprint


def test_an_alias_of_a_hosted_buffer_is_no_program():
    program = momentum(2)
    old, new = sorted(program.streamed_in)[0], sorted(program.streamed_out)[0]
    broken = dataclasses.replace(program, aliases=(*program.aliases, (old, new)))
    assert any("hosted" in line for line in check_program(broken))


@given(st.data())
def test_random_programs(data):
    program = data.draw(programs())
    aliased = {b for alias in program.aliases for b in alias}
    ends = sorted({*program.inputs, *program.outputs} - aliased)
    hosted = data.draw(st.lists(st.sampled_from(ends), unique=True)) if ends else []
    program = dataclasses.replace(program, hosted=tuple(sorted(hosted)))
    link = data.draw(st.sampled_from([FAST, SLOW]))
    plan = Streaming(Exact(), link).plan(program, costs(program), None)
    check(program, plan, link)
    unstreamed = plan_of(program, plan.order)
    assert (
        peak_by_definition(program, plan.order)
        == simulate(program, plan.order, costs(program)).peak
    )
    streamed = program.streamed_in | program.streamed_out
    assert bool(violations(program, unstreamed)) == bool(streamed)
