"""The search of `auto` in programs that are too long for all of it: fewer runs, and it says so."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import chain, unit_costs

from vmem_jax.core.plan import Plan
from vmem_jax.core.simulate import simulate
from vmem_jax.core.validate import violations
from vmem_jax.policy import auto
from vmem_jax.policy.auto import Auto
from vmem_jax.policy.convolving import Convolving

SEARCHING = Auto(close=0.0)
"""Searches even where a start reaches its bound."""


def planned(policy, program, budget):
    """The plan, and how often the step was run on paper for it."""
    runs = []

    def counted(*args, **kwargs):
        runs.append(1)
        return simulate(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "simulate", counted)
        return policy.plan(program, unit_costs(program), budget), len(runs)


def test_a_long_program_is_run_less_often_for_a_plan_as_good():
    program, budget = chain(200), 120
    whole, runs = planned(SEARCHING, program, budget)
    some = dataclasses.replace(SEARCHING, most=len(program.steps) // 8)
    part, fewer = planned(some, program, budget)
    assert fewer < runs
    assert violations(program, part) == [] and part.predicted_peak <= budget
    assert part.predicted_seconds <= 1.02 * whole.predicted_seconds


def test_it_says_what_it_left_out():
    program = chain(30)
    assert Auto().spared(program) == ""
    short = Auto(most=len(program.steps) // 4, offers=48)
    said = Convolving(short).spared(program)
    assert said == short.spared(program)
    for part in (f"there are {len(program.steps)}", "0.1% of its bound", "11 dropped", "of 48"):
        assert part in said


def test_where_nothing_is_left_out_the_plan_is_the_same():
    program = chain(60)
    a, _ = planned(Auto(), program, 20)
    b, _ = planned(dataclasses.replace(Auto(), most=len(program.steps)), program, 20)
    assert isinstance(a, Plan) and a == b
