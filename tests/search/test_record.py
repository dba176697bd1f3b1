"""record: plans that were compiled are candidates of later searches."""

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
    find,
    variant,
)

from vmem_jax import POLICIES
from vmem_jax.api.failure import budget_error
from vmem_jax.api.records import forget, record_of
from vmem_jax.policy.base import Infeasible
from vmem_jax.search.attempt import Record, Tried
from vmem_jax.search.params import SearchParams


@pytest.fixture(autouse=True)
def forgotten():
    forget()
    yield
    forget()


def plan_for(budget):
    return auto(STAYING).plan(PROGRAM, STILL, budget)


def tried(plan, need):
    return Tried(dataclasses.replace(plan, budget=None), need)


def record(*plans):
    """A record of pairs (plan, need)."""
    made = Record()
    for plan, need in plans:
        made.add(tried(plan, need))
    return made


def test_the_minimum_peak_that_an_error_names_is_met_when_it_is_asked_for():
    """The compiler needs a fifth more than predicted, so nothing is predicted to fit there twice."""
    compile_plan = Compiler(lambda plan: plan.predicted_peak * 6 // 5)
    one = variant(compile_plan, POLICIES["recompute"](), STILL)
    both = Record()
    first = find(one, budget=LOW + 1, record=both)
    assert not first.fits
    least = budget_error("recompute", LOW + 1, first, resident=0).lowest_peak
    again = find(one, budget=least, record=both)
    assert again.fits and again.best.need == least


def test_what_is_proved_is_not_planned():
    compile_plan = Compiler()
    known = (plan_for(BUDGET), BUDGET)

    class Blind(Recording):
        def plan(self, program, costs, budget):
            self.asked.append(budget)
            return Infeasible("auto", budget, HIGH, "", plan=plan_for(HIGH))

    found = find(variant(compile_plan, Blind(STAYING), STILL), record=record(known))
    assert found.fits and [p.order for p in compile_plan.plans] == [known[0].order]


def test_a_plan_that_is_proved_is_taken_only_where_it_fits():
    compile_plan = Compiler()
    high = plan_for(HIGH)
    found = find(variant(compile_plan, auto(STAYING), STILL), record=record((high, HIGH)))
    assert found.fits and high.order not in {plan.order for plan in compile_plan.plans}


class Fickle(Recording):
    """A policy that does worse with one byte more."""

    def plan(self, program, costs, budget):
        self.asked.append(budget)
        return plan_for(BUDGET if budget <= BUDGET else LOW + (BUDGET - LOW) * 2 // 3)


def test_a_larger_budget_never_ends_in_a_slower_plan():
    """The plan for one byte less is taken."""
    one = variant(Compiler(), Fickle(STAYING), STILL)
    both = Record()
    first = find(one, budget=BUDGET, record=both)
    alone = find(one, budget=BUDGET + 1, spread=())
    assert alone.best.plan.predicted_seconds > first.best.plan.predicted_seconds
    again = find(one, budget=BUDGET + 1, record=both, spread=())
    assert again.best.plan.predicted_seconds == first.best.plan.predicted_seconds


def test_what_is_compiled_next_is_planned_for_less_too():
    """Unless it takes hardly longer than the step without a limit."""
    first = find(variant(Compiler(), Fickle(STAYING), STILL), budget=BUDGET)
    compile_plan, policy = Compiler(), Fickle(STAYING)
    policy.asked.clear()
    found = find(variant(compile_plan, policy, STILL), budget=BUDGET + 1)
    assert found.best.plan.predicted_seconds == first.best.plan.predicted_seconds
    assert policy.asked == [BUDGET + 1, *(int(s * (BUDGET + 1)) for s in SearchParams().spread)]
    assert len(compile_plan.plans) == 1
    policy.asked.clear()
    find(variant(Compiler(), policy, STILL), budget=BUDGET + 1, much_more=9.0)
    assert policy.asked == [BUDGET + 1]


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
    found = find(variant(compile_plan, auto(STAYING), STILL), record=record(*others))
    assert found.fits
    assert not {plan.order for plan, _ in others[:3]} & {p.order for p in compile_plan.plans}
    assert not any(p.moves for p in compile_plan.plans)


# -- what is kept


def test_a_record_has_what_was_added_once():
    plan, one = plan_for(BUDGET), variant(None, auto(STAYING), STILL)
    kept = record((plan, 5), (plan, 5))
    assert kept.all() == kept.candidates(one) == [tried(plan, 5)]


def test_of_a_program_the_lowest_and_the_latest_plans_are_kept():
    plan = plan_for(BUDGET)
    plans = [(dataclasses.replace(plan, predicted_peak=i), 100 + i) for i in range(40)]
    kept, every = record(*plans).all(), [tried(*one) for one in plans]
    assert every[0] in kept and every[-1] in kept and len(kept) < len(every)


def test_the_program_that_was_not_asked_for_the_longest_is_forgotten_first():
    records = [record_of(PROGRAM, i) for i in range(32)]
    assert record_of(PROGRAM, 0) is records[0]
    record_of(PROGRAM, 32)
    assert record_of(PROGRAM, 0) is records[0]
    assert record_of(PROGRAM, 1) is not records[1]
    forget()
    assert record_of(PROGRAM, 0) is not records[0]


def test_programs_and_options_have_records_of_their_own():
    other = dataclasses.replace(PROGRAM, outputs=PROGRAM.outputs[:1])
    records = {id(record_of(p, o)) for p in (PROGRAM, other) for o in ("a", "b")}
    assert len(records) == 4 and id(record_of(PROGRAM, "a")) in records
