"""estimate: a plan that fits with what XLA's heap takes, found before anything is compiled."""

from __future__ import annotations

import dataclasses

import pytest
from search_cases import (
    BUDGET,
    FAST,
    HIGH,
    LOW,
    PROGRAM,
    STILL,
    Compiler,
    Recording,
    find,
    lowest_plan,
    variant,
)

from vmem_jax import POLICIES
from vmem_jax.core.plan import Plan
from vmem_jax.policy.base import Infeasible
from vmem_jax.search.estimate import Estimate, estimate, refined
from vmem_jax.search.log import SearchLog
from vmem_jax.search.params import SearchParams


def estimated(policy, goal=BUDGET, before=None, log=None, **params):
    one = variant(None, policy, FAST)
    return estimate(one, goal, SearchParams(**params), log or SearchLog(), before)


@pytest.mark.parametrize("long_steps", [1, 1000])
@pytest.mark.parametrize(
    "more", [lambda plan: 3, lambda plan: 3 if plan.transfers else 9], ids=["all", "by plan"]
)
def test_what_the_heap_takes_is_taken_off_before_anything_is_compiled(heap, more, long_steps):
    """Of a heap that takes more than is live, more of some plans, the first compile fits."""
    need = heap(lambda program, plan: plan.predicted_peak + more(plan))
    policy, compile_plan = Recording(), Compiler(lambda plan: need(PROGRAM, plan))
    found = find(variant(compile_plan, policy), long_steps=long_steps)
    (attempt,) = found.attempts
    assert attempt.need == attempt.predicted_need <= BUDGET
    first, made = policy.made[0], policy.made
    assert first.predicted_peak + more(first) > BUDGET  # the first plan was not it
    fitting = [plan for plan in made if isinstance(plan, Plan) and need(PROGRAM, plan) <= BUDGET]
    assert attempt.plan.predicted_seconds == min(plan.predicted_seconds for plan in fitting)
    assert len(fitting) == 1 or long_steps > 1


def test_the_lowest_plan_is_taken_where_nothing_lower_can_be_planned(heap):
    """The heap takes far more of every other plan than is live at once."""
    policy = POLICIES["recompute"]()
    lowest = lowest_plan(policy)
    need = heap(lambda _, plan: plan.predicted_peak + (0 if plan.order == lowest.order else HIGH))
    assert policy.plan(PROGRAM, FAST, BUDGET).order != lowest.order
    compile_plan = Compiler(lambda plan: need(PROGRAM, plan))
    (attempt,) = find(variant(compile_plan, policy)).attempts
    assert attempt.plan.order == lowest.order and attempt.need <= BUDGET


def test_without_a_goal_one_plan_is_made():
    policy, log = Recording(), SearchLog()
    one = estimated(policy, None, log=log)
    assert one.plan == policy.made[0] and log.plans == len(policy.made) == 1
    assert one.fits(None)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_so_many_plans_are_made_for_one_estimate(heap, most):
    """The heap takes too much of every plan."""
    heap(lambda program, plan: plan.predicted_peak + 1000)
    policy, log = Recording(), SearchLog()
    one = estimated(policy, log=log, plans_per_estimate=most)
    assert not one.fits(BUDGET) and log.plans == len(policy.made) <= most


def test_what_fits_nowhere_is_the_plan_that_needs_the_least(heap):
    need = heap(lambda program, plan: plan.predicted_peak + 1000)
    policy = Recording()
    one = estimated(policy)
    plans = [p if isinstance(p, Plan) else p.plan for p in policy.made]
    assert one.need == min(need(PROGRAM, plan) for plan in plans)


def test_what_the_heap_took_of_a_plan_that_missed_is_taken_off_at_once(heap):
    heap(lambda program, plan: plan.predicted_peak + 5)
    policy = Recording()
    missed = policy.plan(PROGRAM, FAST, BUDGET)
    policy.asked.clear()
    estimated(policy, before=Estimate(missed, missed.predicted_peak + 5))
    assert policy.asked[0][1] == BUDGET - 5


class Asked(POLICIES["recompute"]):
    """Which notes what it is asked for, and has the lowest plan with some changes."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "asked", [])

    def changed(self, budget, **changes):
        self.asked.append(budget)
        lowest = lowest_plan(POLICIES["recompute"]())
        return dataclasses.replace(lowest, budget=budget, **changes)


class Same(Asked):
    """Whose lowest plan is of another order for each goal, and of the same peak."""

    def plan(self, program, costs, budget):
        plan = self.changed(budget, order=(*range(len(program.steps)), *range(budget % 3)))
        return Infeasible(self.name, budget, HIGH, "there", plan=plan)


def test_a_lowest_plan_that_missed_is_asked_for_with_less(heap):
    """The heap takes least of the plan for half as much beyond the residents."""
    floor = LOW + 1
    asked = floor + 4
    heap(lambda _, plan: BUDGET + abs(plan.budget - floor - 2))
    missed = Same().plan(PROGRAM, FAST, asked).plan
    missed = dataclasses.replace(missed, predicted_peak=HIGH)
    policy = Same()
    one = estimated(policy, BUDGET, Estimate(missed, BUDGET))
    assert policy.asked[-1] == one.plan.budget == floor + 2 and one.fits(BUDGET)
    known = Same()  # nothing is known of what another search asked for
    estimated(known, BUDGET, Estimate(dataclasses.replace(missed, budget=None), BUDGET))
    assert known.asked == policy.asked[:-1]


class Steep(Asked):
    """Which ends at a peak of 100, and at one of 85 where it is asked for 91 or less."""

    def plan(self, program, costs, budget):
        peak = 85 if budget <= 91 else 100
        plan = self.changed(budget, predicted_peak=peak)
        return plan if peak <= budget else Infeasible(self.name, budget, peak, "there", plan=plan)


def test_a_policy_is_asked_for_less_than_its_lowest_plan_has(heap):
    heap(lambda _, plan: plan.predicted_peak)
    policy = Steep()
    one = estimated(policy, 99)
    assert one.plan.predicted_peak == 85 and one.fits(99)
    assert policy.asked == [99, 90]
    far = Steep()  # of 1.25 times the goal and more, less is not expected to be near
    assert not estimated(far, 60).fits(60)
    assert far.asked == [60]


def test_nothing_is_planned_for_less_than_is_resident(heap):
    heap(lambda program, plan: plan.predicted_peak + 1000)
    policy = Recording()
    estimated(policy)
    assert min(goal for _, goal in policy.asked) > LOW


def test_where_a_policy_names_its_lowest_plan_that_is_the_estimate():
    lowest = dataclasses.replace(lowest_plan(POLICIES["recompute"]()), policy="short")

    class Short(POLICIES["recompute"]):
        def plan(self, program, costs, budget):
            return Infeasible("short", budget, BUDGET + 1, "there", plan=lowest)

    one = estimated(Short(), LOW + 1)
    assert one.plan == lowest and one.is_lowest and not one.fits(LOW + 1)


@pytest.mark.parametrize(
    "steps, expected", [(10, 0.01), (1_000, 0.01), (3_000, 0.03), (10**6, 0.1)]
)
def test_the_tolerance_of_a_plan_grows_with_the_program(steps, expected):
    assert SearchParams().plan_tolerance_of(steps) == pytest.approx(expected)


@pytest.mark.parametrize(
    "lowest, long_steps, shares",
    [
        (0.0, 1000, (0.9, 0.8, 0.7, 0.6)),
        (0.0, len(PROGRAM.steps) - 1, (0.9, 0.7)),
        (0.75, 1000, (0.9, 0.8, 0.7)),
    ],
    ids=["all", "a longer program", "down to the lowest"],
)
def test_what_is_compiled_next_is_the_fastest_of_several_goals(heap, lowest, long_steps, shares):
    """Here a plan for fewer bytes takes less time, down to the lowest, which takes the least."""
    heap(lambda program, plan: BUDGET)
    slow = dataclasses.replace(lowest_plan(POLICIES["recompute"]()), predicted_seconds=1e9)
    asked = []

    class Faster(POLICIES["recompute"]):
        def plan(self, program, costs, budget):
            asked.append(budget)
            plan = dataclasses.replace(slow, predicted_seconds=budget)
            if budget >= lowest * BUDGET:
                return plan
            return Infeasible(self.name, budget, BUDGET, "there", plan=plan)

    one = variant(None, Faster(), STILL)
    params = SearchParams(spread=(0.9, 0.8, 0.7, 0.6), long_steps=long_steps, much_more=-1.0)
    found = refined(one, BUDGET, Estimate(slow, BUDGET), params, SearchLog())
    goals = [int(share * BUDGET) for share in shares]
    assert asked == goals and found.seconds == goals[-1]
