"""trace: what a viewer is shown is what the simulator said."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import chain, orders, programs, unit_costs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_moves import costs_of, parks_of

import vmem_jax
from vmem_jax.core.costs import Source
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.core.stays import live_by_kind
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.transfer_schedule import schedule_transfers
from vmem_jax.report.trace import COMPUTE, INTO, OUT, Recording, Span, chrome_trace, predicted, save

some = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))

CHAIN = chain(8, size=10)
ORDER = (*range(9), 2, *range(9, 17))  # layer 2 is made again
MOVES = (Transfer(2, 3, 4, 14, 15), Transfer(5, 7, 8, 9, 10))
SLOW = costs_of(CHAIN, link=2.0)


def slow() -> Timeline:
    timeline = simulate(CHAIN, ORDER, SLOW, MOVES)
    assert len(timeline.waits) == 4  # both ways of both: the link is slow
    return timeline


def read(trace: dict) -> dict[str, list[dict]]:
    """The events of `trace` by lane, counter or instant, as a viewer reads them."""
    events = json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[dict]] = {}
    for e in events:
        if e["ph"] == "X":
            found.setdefault(lanes[e["pid"], e["tid"]], []).append(e)
        elif e["ph"] in "Ci":
            found.setdefault(e["name"], []).append(e)
    return found


def seconds(events: list[dict]) -> float:
    return sum(e["dur"] for e in events) / 1e6


def of(category: str, events: list[dict]) -> list[dict]:
    return [e for e in events if e["cat"] == category]


def assert_apart(events: list[dict]) -> None:
    """Nothing in a lane begins before what came before it has ended."""
    ordered = sorted(events, key=lambda e: (e["ts"], e["ts"] + e["dur"]))
    for before, after in itertools.pairwise(ordered):
        assert after["ts"] >= before["ts"] + before["dur"] - 1e-3


def test_the_lanes_hold_what_the_simulator_ran():
    timeline = slow()
    lanes = read(chrome_trace(predicted(CHAIN, timeline, SLOW)))
    steps = of("step", lanes[COMPUTE])
    assert [e["args"]["step"] for e in steps] == list(ORDER)
    assert [e["ts"] / 1e6 for e in steps] == pytest.approx(timeline.start)
    assert seconds(lanes[COMPUTE]) == pytest.approx(timeline.seconds)  # it works or waits
    assert seconds(steps) == len(ORDER)
    for lane in (COMPUTE, OUT, INTO):
        assert_apart(lanes[lane])
    for way, lane in ((0, OUT), (1, INTO)):
        assert [(e["ts"] / 1e6, e["dur"] / 1e6) for e in lanes[lane]] == [
            (pytest.approx(pair[way].begin), pytest.approx(pair[way].end - pair[way].begin))
            for pair in timeline.copies
        ]
        assert [e["args"]["transfer"] for e in lanes[lane]] == [0, 1]


def test_a_step_says_where_it_comes_from():
    sources = (Source.MEASURED, *[Source.CALIBRATED] * (len(CHAIN.steps) - 1))
    costs = dataclasses.replace(SLOW, sources=sources)
    steps = of("step", read(chrome_trace(predicted(CHAIN, slow(), costs)))[COMPUTE])
    made_again = steps[9]
    assert made_again["name"] == "layer2: op again"
    about = {"layer": "layer2", "op": "op", "phase": "forward", "line": "model.py:3"}
    assert about.items() <= made_again["args"].items() and made_again["args"]["recomputed"]
    assert [e["args"]["seconds from"] for e in steps[:2]] == ["measured", "calibrated"]
    assert sum(e["args"]["recomputed"] for e in steps) == 1


def test_a_stall_is_the_transfers_that_caused_it():
    timeline = slow()
    stalls = of("stall", read(chrome_trace(predicted(CHAIN, timeline, SLOW)))[COMPUTE])
    for i, waited in enumerate(timeline.stalls):
        own = [e for e in stalls if e["args"]["transfer"] == i]
        assert waited > 0 and seconds(own) == pytest.approx(waited)
        for e in own:  # it ends with the copy that it waits for
            copy = timeline.copies[i][e["args"]["for the copy"] == INTO]
            assert (e["ts"] + e["dur"]) / 1e6 == pytest.approx(copy.end)


def test_counters_are_the_live_bytes_and_the_peak_is_marked():
    timeline = slow()
    found = read(chrome_trace(predicted(CHAIN, timeline, SLOW, budget=77)))
    totals = [sum(e["args"].values()) for e in found["live bytes"]]
    assert totals == list(timeline.live_nbytes)
    assert [e["ts"] / 1e6 for e in found["live bytes"]] == pytest.approx(timeline.start)
    assert {e["args"]["budget"] for e in found["budget"]} == {77}
    (peak,) = found["peak"]
    assert peak["args"]["nbytes"] == timeline.peak == max(totals)
    assert peak["ts"] / 1e6 == pytest.approx(timeline.start[timeline.peak_at])
    assert "layer" in peak["args"]["at"]
    assert "budget" not in read(chrome_trace(predicted(CHAIN, timeline, SLOW)))


def test_the_peak_shows_where_steps_take_no_time():
    costs = dataclasses.replace(SLOW, seconds=(0.0,) * len(CHAIN.steps))
    timeline = simulate(CHAIN, range(len(CHAIN.steps)), costs)
    counters = read(chrome_trace(predicted(CHAIN, timeline, costs)))["live bytes"]
    assert [sum(e["args"].values()) for e in counters] == [timeline.peak]


@some
@given(data=st.data())
def test_live_bytes_by_kind_add_up_to_the_simulators(data):
    program = data.draw(programs())
    timeline = simulate(program, data.draw(orders(program)), unit_costs(program))
    assert [sum(now.values()) for now in live_by_kind(program, timeline)] == list(
        timeline.live_nbytes
    )
    assert all(n >= 0 for now in live_by_kind(program, timeline) for n in now.values())


@some
@given(data=st.data(), link=st.sampled_from([0.3, 1.0, 10.0]))
def test_whatever_moves_the_lanes_add_up(data, link):
    program: Program = data.draw(programs(pure=True))
    base = data.draw(orders(program, repeats=0))
    costs = costs_of(program, link)
    parks = [park for park in parks_of(program, base) if data.draw(st.booleans())]
    run = Execution(program, costs, base, parks=parks)
    timeline = schedule_transfers(program, run.order, run.away, costs, program.resident_nbytes)
    assert [sum(now.values()) for now in live_by_kind(program, timeline)] == list(
        timeline.live_nbytes
    )
    lanes = read(chrome_trace(predicted(program, timeline, costs)))
    for lane in {COMPUTE, OUT, INTO} & set(lanes):
        assert_apart(lanes[lane])
    assert seconds(lanes[COMPUTE]) == pytest.approx(timeline.seconds)
    assert seconds(of("stall", lanes[COMPUTE])) == pytest.approx(sum(timeline.stalls))


def test_recordings_lie_side_by_side_and_are_saved(tmp_path):
    one = Recording("predicted", [Span(COMPUTE, "a", "step", 0.0, 1.0)])
    two = Recording("measured", [Span(OUT, "b", "copy", 0.5, 1.5, {"nbytes": 3})])
    save(chrome_trace(one, two), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "predicted", 2: "measured"}
    spans = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [(1, "a", 0.0, 1e6), (2, "b", 0.5e6, 1e6)]
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


# -- what viewers demand

PHASES = {"X", "C", "i", "M"}
NAMED = {"process_name": "name", "thread_name": "name"}
SORTED = {"process_sort_index", "thread_sort_index"}


def assert_trace_event_format(trace: dict) -> None:
    """The rules of the Trace Event Format (JSON object form) for the phases that are written here.

    Perfetto drops events that break them, without an error.
    """
    assert isinstance(trace["traceEvents"], list) and trace["displayTimeUnit"] in ("ms", "ns")
    is_number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
    for event in trace["traceEvents"]:
        assert event["ph"] in PHASES and isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            if event["name"] in NAMED:
                assert isinstance(event["args"]["name"], str)
            else:
                assert event["name"] in SORTED and isinstance(event["args"]["sort_index"], int)
            continue
        assert is_number(event["ts"]) and event["ts"] >= 0
        if event["ph"] == "X":
            assert is_number(event["dur"]) and event["dur"] >= 0
            assert isinstance(event["tid"], int) and isinstance(event["cat"], str)
        elif event["ph"] == "C":
            assert event["args"] and all(map(is_number, event["args"].values()))
        else:
            assert event["s"] in "gpt" and isinstance(event["tid"], int)
    lanes = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] in "Xi"} <= lanes


def train_step(weights, x):
    def loss(weights):
        y = x
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


ARGUMENTS = (
    [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 6,
    jax.ShapeDtypeStruct((2048, 32), jnp.float32),
)


def test_the_file_of_a_step_has_the_form_that_viewers_read(tmp_path):
    step = vmem_jax.jit(train_step, budget=0.7, donate_argnums=0)
    step.explain(*ARGUMENTS).save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert_trace_event_format(trace)
    assert_trace_event_format(chrome_trace(predicted(CHAIN, slow(), SLOW, budget=77)))
    assert {event["ph"] for event in trace["traceEvents"]} == PHASES
    broken = {**trace, "traceEvents": [{**trace["traceEvents"][-1], "ts": "0"}]}
    with pytest.raises(AssertionError):
        assert_trace_event_format(broken)


def test_layers_are_named_in_what_profilers_of_xla_show():
    """Also those of steps that run again: their names come from the metadata of instructions."""
    step = vmem_jax.jit(train_step, budget=0.7, donate_argnums=0, sub_batches=1)
    recomputed = step.plan(*ARGUMENTS).recomputed
    text = step.lower(*ARGUMENTS).compile().as_text()
    products = lambda text: re.findall(r'op_name="[^"]*/jvp\(layer(\d)\)/dot_general"', text)
    plain = jax.jit(train_step, donate_argnums=0).lower(*ARGUMENTS).compile().as_text()
    assert recomputed and {*products(text)} == {*products(plain)} == {*"012345"}
    assert len(products(text)) > len(products(plain))  # a product that runs twice is named twice
    assert {*re.findall(r"transpose\(jvp\(layer(\d)\)\)", text)} == {*"012345"}
