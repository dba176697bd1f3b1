"""Plan: saved and loaded unchanged; damaged, foreign and other-version files are refused."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from helpers import chain, orders, plan_of, programs
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax import Plan, PlanError, VmemError
from vmem_jax.core.plan import FORMAT, keep_plan
from vmem_jax.core.validate import check_made_for

PLAN = plan_of(chain(2), (0, 1, 2, 3, 0, 4), budget=7, predicted_peak=6, predicted_seconds=0.25)


def test_round_trip(tmp_path):
    path = tmp_path / "step.plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert Plan.load(str(path)) == PLAN
    assert [p.name for p in tmp_path.iterdir()] == ["step.plan.json"]
    divided = dataclasses.replace(PLAN, kept=((1, 2), (0,)), segments=(((9, 3), (2,)), ((), ())))
    divided.save(path)
    assert Plan.load(path) == divided


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_round_trip_of_random_plans(data):
    program = data.draw(programs())
    order = data.draw(orders(program))
    plan = plan_of(
        program,
        order,
        budget=data.draw(st.none() | st.integers(1, 2**60)),
        predicted_seconds=data.draw(st.floats(0, 1e6)),
    )
    assert Plan.from_json(plan.to_json()) == plan
    check_made_for(program, plan)


def test_recomputed_counts_each_time_after_the_first():
    assert plan_of(chain(3), (0, 1, 0, 2, 0, 1)).recomputed == (0, 0, 1)


def test_str_says_policy_sizes_and_recomputation():
    text = "Plan(drawn, budget 7 B: predicted 6 B, 250.00 ms, 6 steps, 1 of them recomputed)"
    assert str(PLAN) == text


@pytest.mark.parametrize("length", [0, 1, 40, -2, -1])
def test_cut_off_is_refused(length):
    text = PLAN.to_json()
    with pytest.raises(PlanError, match=r"`x.json` is no whole plan: .* at character \d+ of \d+"):
        Plan.from_json(text[:length], "x.json")


def edited(**changes):
    raw = {**json.loads(PLAN.to_json()), **changes}
    return json.dumps({k: v for k, v in raw.items() if v is not ...})


@pytest.mark.parametrize(
    "text, words",
    [
        (edited(format=FORMAT + 1), f"has plan format {FORMAT + 1}; .* reads {FORMAT}"),
        (edited(format=...), "has plan format None"),
        ("[1, 2]", "has plan format 'list'"),
        ("null", "has plan format 'NoneType'"),
        (edited(order=...), r"missing fields \['order'\]"),
        (edited(colour="red"), r"unknown \['colour'\]"),
        (edited(order="012"), "wrong type"),
        (edited(order=[0, 1.5]), "wrong type"),
        (edited(order=[0, True]), "wrong type"),
        (edited(order=[0, "1"]), "wrong type"),
        (edited(fenced=1), "wrong type"),
        (edited(budget="7"), "wrong type"),
        (edited(budget=True), "wrong type"),
        (edited(predicted_peak=True), "wrong type"),
        (edited(predicted_peak=None), "wrong type"),
        (edited(predicted_seconds="fast"), "wrong type"),
        (edited(program=7), "wrong type"),
        (edited(segments=[[4, 1, 2]]), "wrong type"),
        (edited(segments=[[[4, 2]]]), "wrong type"),
    ],
)
def test_edited_file_is_refused(text, words):
    with pytest.raises(PlanError, match=words):
        Plan.from_json(text)


def test_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00garbage")
    with pytest.raises(PlanError, match=re.escape(str(path))):
        Plan.load(path)


def test_missing_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "other, words",
    [
        (chain(3), "it has 5 distinct steps, this one has 7"),
        (chain(2, size=2), "shapes, dtypes, donation or the computation itself differ"),
    ],
)
def test_plan_of_another_step_is_refused(other, words):
    with pytest.raises(PlanError, match=f"made for another step.*{words}") as caught:
        check_made_for(other, PLAN)
    assert isinstance(caught.value, VmemError)
    assert other.fingerprint in str(caught.value)


@pytest.mark.parametrize(
    "order, words",
    [
        ((0, 1, 2, 3), "never runs"),
        ((1, 0, 2, 3, 4), "unmade"),
        ((0, 1, 2, 3, 4, 5), "names step 5 of 5"),
    ],
)
def test_edited_order_is_refused(order, words):
    plan = plan_of(chain(2), order)
    with pytest.raises(PlanError, match=f"not valid for its step: .*{words}"):
        check_made_for(chain(2), plan)


def test_keep_plan_is_the_traced_order():
    plan = keep_plan(chain(2), 9, 5, 1.0)
    assert (plan.order, plan.fenced, plan.recomputed) == ((0, 1, 2, 3, 4), False, ())
    check_made_for(chain(2), plan)
