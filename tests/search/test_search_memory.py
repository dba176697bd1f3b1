"""memory: plans that were compiled are candidates of later searches."""

from __future__ import annotations

import dataclasses

import pytest
from search_cases import (
    BUDGET,
    FAST,
    HIGH,
    LOW,
    PROGRAM,
    STAYING,
    STILL,
    Compiler,
    Recording,
    auto,
    family,
    find,
    variant,
)

from vmem_jax import POLICIES
from vmem_jax.api.failure import budget_error
from vmem_jax.policy.base import Infeasible
from vmem_jax.search import memory


@pytest.fixture(autouse=True)
def forgotten():
    memory.forget()
    yield
    memory.forget()


def plan_for(budget):
    return auto(STAYING).plan(PROGRAM, STILL, budget)


def proved(found):
    unbound = lambda plan: dataclasses.replace(plan, budget=None)
    return [(unbound(attempt.plan), attempt.need) for attempt in found.attempts]


def test_the_minimum_peak_that_an_error_names_is_met_when_it_is_asked_for():
    """The compiler needs a fifth more than predicted, so nothing is predicted to fit there twice."""
    compile_plan = Compiler(lambda plan: plan.predicted_peak * 6 // 5)
    one = variant(compile_plan, POLICIES["recompute"](), STILL)
    first = find(one, budget=LOW + 1)
    assert not first.fits
    least = budget_error("recompute", LOW + 1, first, resident=0).lowest_peak
    again = find([family(one, proved=proved(first))], budget=least)
    assert again.fits and again.best.need == least


def test_what_is_proved_is_not_planned():
    compile_plan = Compiler()
    known = [(plan_for(BUDGET), BUDGET)]

    class Blind(Recording):
        def plan(self, program, costs, budget):
            self.asked.append(budget)
            return Infeasible("auto", budget, HIGH, "")

    found = find([family(variant(compile_plan, Blind(STAYING), STILL), proved=known)])
    assert found.fits and compile_plan.plans == [known[0][0]]


def test_a_plan_that_is_proved_is_taken_only_where_it_fits():
    compile_plan = Compiler()
    known = [(plan_for(HIGH), HIGH)]
    found = find([family(variant(compile_plan, auto(STAYING), STILL), proved=known)])
    assert found.fits and known[0][0].order not in {plan.order for plan in compile_plan.plans}


def test_a_larger_budget_never_ends_in_a_slower_plan():
    """A policy that does worse with one byte more: the plan for one byte less is taken."""

    class Fickle(Recording):
        def plan(self, program, costs, budget):
            return plan_for(BUDGET if budget <= BUDGET else LOW + (BUDGET - LOW) * 2 // 3)

    one = variant(Compiler(), Fickle(STAYING), STILL)
    first = find(one, budget=BUDGET)
    alone = find(one, budget=BUDGET + 1)
    assert alone.best.plan.predicted_seconds > first.best.plan.predicted_seconds
    again = find([family(one, proved=proved(first))], budget=BUDGET + 1)
    assert again.best.plan.predicted_seconds == first.best.plan.predicted_seconds


def test_a_plan_of_another_program_or_policy_or_that_moves_is_not_taken():
    plan = plan_for(BUDGET)
    moving = POLICIES["auto"](allow=("order", "offload")).plan(PROGRAM, FAST, BUDGET)
    assert moving.moves
    others = [
        (dataclasses.replace(plan, program="another", order=plan.order[::-1]), LOW),
        (dataclasses.replace(plan, policy="another", order=plan.order[::-1]), LOW),
        (dataclasses.replace(plan, kept=((0,),), order=plan.order[::-1]), LOW),
        (moving, LOW),
    ]
    compile_plan = Compiler()
    found = find([family(variant(compile_plan, auto(STAYING), STILL), proved=others)])
    assert found.fits
    assert not {plan.order for plan, _ in others[:3]} & {p.order for p in compile_plan.plans}
    assert not any(p.moves for p in compile_plan.plans)


# -- what is kept


def key(i=0):
    return f"program {i}", "options"


def test_what_is_kept_is_proved():
    plan = plan_for(BUDGET)
    assert memory.proved(key()) == []
    memory.keep(key(), [(plan, 5)])
    memory.keep(key(), [(plan, 5)])
    assert memory.proved(key()) == [(plan, 5)] and memory.proved(key(1)) == []
    memory.forget()
    assert memory.proved(key()) == []


def test_of_a_program_the_lowest_and_the_latest_plans_are_kept():
    plan = plan_for(BUDGET)
    plans = [(dataclasses.replace(plan, predicted_peak=i), 100 + i) for i in range(40)]
    for one in plans:
        memory.keep(key(), [one])
    kept = memory.proved(key())
    assert plans[0] in kept and plans[-1] in kept and len(kept) < len(plans)


def test_the_program_that_was_not_asked_for_the_longest_is_forgotten_first():
    plan = plan_for(BUDGET)
    for i in range(64):
        memory.keep(key(i), [(plan, 5)])
    memory.proved(key(0))
    memory.keep(key(64), [(plan, 5)])
    assert memory.proved(key(0)) and not memory.proved(key(1))


def test_a_key_tells_programs_and_options_apart():
    other = dataclasses.replace(PROGRAM, outputs=PROGRAM.outputs[:1])
    keys = {memory.key_of(p, o) for p in (PROGRAM, other) for o in ("a", "b")}
    assert len(keys) == 4 and memory.key_of(PROGRAM, "a") in keys
