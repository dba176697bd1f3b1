"""What is known to fit, or not to, before anything is compiled: compiles are counted."""

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
    compiled,
    family,
    find,
    lowest_plan,
    over,
    untouched,
    variant,
)

from vmem_jax import POLICIES
from vmem_jax.core.costs import Link
from vmem_jax.core.planned import simulate_plan
from vmem_jax.policy import Keep
from vmem_jax.search.attempt import Record, Tried
from vmem_jax.search.log import SearchLog, What

SLOW = dataclasses.replace(STILL, seconds=tuple(3 * s for s in STILL.seconds))
"""Of a step that takes three times as long."""


class Other(Recording):
    """A system whose plans replace those of the chosen policy."""

    name = "other"


def other_plan(costs=STILL, allow=STAYING):
    return dataclasses.replace(
        auto(allow).plan(PROGRAM, costs, BUDGET), policy="other", budget=None
    )


def known(plan, need=BUDGET):
    record = Record()
    record.add(Tried(plan, need))
    return record


# -- a plan of a later group


def first_and_later(costs, later_costs=STILL, need=None, allow=STAYING):
    """Compilers of both groups, and the groups."""
    first, later = Compiler(), Compiler(need)
    groups = (
        variant(first, auto(STAYING), costs, "first"),
        variant(later, Other(allow), later_costs, "later"),
    )
    return first, later, groups


def test_where_a_plan_of_a_later_group_is_known_to_fit_nothing_slower_is_compiled_or_planned():
    first, later, groups = first_and_later(SLOW)
    log = SearchLog()
    found = find(*groups, record=known(other_plan()), log=log)
    assert found.fits and found.best.variant.name == "later"
    assert (len(first.plans), len(later.plans)) == (0, 1) and log.plans == 0
    assert log.of(What.PRUNED)

    first, later, groups = first_and_later(SLOW)
    assert find(*groups).best.variant.name == "first"  # its turn, where nothing is known


@pytest.mark.parametrize("gain, taken", [(0.02, "first"), (0.2, "later")])
def test_such_a_plan_is_taken_only_where_it_is_faster_by_the_tolerance(gain, taken):
    """What the own plan takes is a multiple of what the other one does."""
    plan = other_plan()
    own = auto(STAYING).plan(PROGRAM, STILL, BUDGET).predicted_seconds
    share = plan.predicted_seconds / own / (1 - gain)
    costs = dataclasses.replace(STILL, seconds=tuple(share * s for s in STILL.seconds))
    *_, groups = first_and_later(costs)
    found = find(*groups, record=known(plan), time_tolerance=0.05)
    assert found.best.variant.name == taken and len(found.attempts) == 1


def test_such_a_plan_is_taken_only_where_it_is_faster_though_nothing_hides_its_copies():
    """Each copy takes as long as two steps, and by prediction other steps hide them."""
    size = max(buffer.nbytes for buffer in PROGRAM.buffers)
    costs = dataclasses.replace(STILL, link=Link(size / 2, size / 2, size))
    plan = other_plan(costs, ("order", "recompute", "offload"))
    assert plan.transfers
    one = variant(None, Other(), costs)
    hidden, unhidden = plan.predicted_seconds, one.unhidden_seconds(plan)
    timeline = simulate_plan(PROGRAM, plan, costs)
    assert unhidden > hidden + sum(c.end - c.begin for c, _ in timeline.copies)
    own = auto(STAYING).plan(PROGRAM, STILL, BUDGET).predicted_seconds

    def takes(seconds):
        mine = dataclasses.replace(STILL, seconds=tuple(seconds / own * s for s in STILL.seconds))
        fits = lambda plan: BUDGET
        *_, groups = first_and_later(mine, costs, fits, ("order", "recompute", "offload"))
        return find(*groups, record=known(plan)).best.variant.name

    assert takes((hidden + unhidden) / 2) == "first"
    assert takes(1.2 * unhidden) == "later"


def test_where_what_is_known_to_fit_no_longer_does_the_search_goes_on():
    first, later, groups = first_and_later(SLOW, need=lambda plan: BUDGET + 1)
    found = find(*groups, record=known(other_plan()))
    assert found.fits and found.best.variant.name == "first"
    assert (len(first.plans), len(later.plans)) == (1, 1)


# -- the step as plain jit runs it


def plain_plan():
    return Keep().plan(PROGRAM, FAST, None)


@pytest.mark.parametrize("how", ["plain_need", "record"])
def test_where_plain_is_known_to_fit_it_is_compiled_alone(how):
    """It is predicted to need more than that: XLA fuses what is predicted as arrays."""
    given = {"plain_need": BUDGET} if how == "plain_need" else {"record": known(plain_plan())}

    def search(**more):
        compile_plan = Compiler(lambda plan: HIGH if plan.fenced else BUDGET)
        one = variant(compile_plan, auto(STAYING), STILL)
        found = find(one, without=untouched(compile_plan), **given, **more)
        assert found.fits and found.best.plan.policy == "keep"
        return len(compile_plan.plans)

    assert search(may_stay=True) == 1
    assert search() > 1  # another policy is asked for


def test_a_plan_that_is_faster_than_plain_is_compiled_before_it():
    quick = dataclasses.replace(FAST, seconds=tuple(0.5 * s for s in FAST.seconds))
    mine, plain = Compiler(), Compiler(lambda plan: BUDGET)
    found = find(
        variant(mine, auto(STAYING), dataclasses.replace(quick, link=None)),
        without=untouched(plain),
        plain_need=BUDGET,
        may_stay=True,
    )
    assert found.best.plan.policy == "auto" and not plain.plans


@pytest.mark.parametrize("may_stay", [True, False])
def test_where_nothing_comes_near_the_budget_plain_is_compiled_first(may_stay):
    """It needs less than the lowest plan is predicted to, which then is not compiled."""
    least = lowest_plan(POLICIES["recompute"]()).predicted_peak
    compile_plan = Compiler(lambda plan: least if plan.fenced else least // 2)
    one = variant(compile_plan, POLICIES["recompute"](), STILL)
    found = find(
        one, budget=least // 4, without=untouched(compile_plan), may_stay=may_stay, near=1.25
    )
    assert not found.fits and found.best.need == least // 2
    assert [plan.fenced for plan in compile_plan.plans] == ([False] if may_stay else [True, False])


def test_plain_is_not_compiled_first_where_the_lowest_plan_needs_little_beside_the_arguments(heap):
    """Plain cannot need so much less that the other one would not be compiled."""
    low = int(1.05 * LOW)
    heap(lambda program, plan: low)
    compile_plan = Compiler(lambda plan: LOW)
    one = variant(compile_plan, POLICIES["recompute"](), STILL)
    found = find(one, budget=LOW // 4, without=untouched(compile_plan), may_stay=True, far=1.1)
    assert found.best.need == LOW and [plan.fenced for plan in compile_plan.plans] == [True]


def test_of_plain_that_is_compiled_first_no_second_compile_is_left():
    least = lowest_plan(POLICIES["recompute"]()).predicted_peak
    compile_plan = over(lambda plan: 0 if plan.fenced else 2 * HIGH)
    one = variant(compile_plan, POLICIES["recompute"](), STILL)
    found = find(
        one, budget=least // 4, without=untouched(compile_plan), may_stay=True, max_compiles=2
    )
    assert found.best.need == least
    assert [plan.fenced for plan in compile_plan.plans] == [False, True]


def test_what_is_expected_to_need_far_more_than_plain_is_not_compiled():
    need = int(0.8 * lowest_plan(POLICIES["recompute"]()).predicted_peak)
    compile_plan = over(lambda plan: 0)
    one = variant(compile_plan, POLICIES["recompute"](), STILL)
    found = find(one, without=untouched(compile_plan), plain_need=need, budget=LOW + 1)
    assert not found.fits and found.best.need == need and not compile_plan.plans


def test_where_predictions_are_too_high_another_system_is_compiled_too():
    """What the first plan compiles to is no measure of what is predicted for the second."""
    policies = POLICIES["recompute"](), Other(STAYING)
    least = lowest_plan(policies[0]).predicted_peak
    mine, other = (Compiler(lambda plan, part=part: int(part * least)) for part in (0.85, 0.75))
    pairs = zip((mine, other), policies, strict=True)
    groups = [[family(variant(each, policy, STILL))] for each, policy in pairs]
    found = find(*groups, budget=int(0.82 * least), near=1.25, far=1.1)
    assert found.fits and found.best.need == int(0.75 * least)
    assert len(mine.plans) == len(other.plans) == 1


def test_where_plans_of_one_system_need_the_same_another_is_compiled_too():
    class Second(POLICIES["recompute"]):
        name = "second"

    policy = POLICIES["recompute"]()
    least = lowest_plan(policy).predicted_peak
    parts = [(0.95, policy), (0.95, policy), (0.95, policy), (0.75, Second())]
    compilers = [Compiler(lambda plan, part=part: int(part * least)) for part, _ in parts]
    pairs = zip(compilers, (own for _, own in parts), strict=True)
    group = [family(variant(each, own, STILL)) for each, own in pairs]
    found = find(group, budget=int(0.8 * least), near=1.1, far=1.5)
    assert found.fits and found.best.need == int(0.75 * least)
    assert [len(each.plans) for each in compilers] == [1, 1, 0, 1]


# -- other stacks


def stacking(compile_plan, costs=STILL, kept=((1,),), policy=None):
    """A variant of the same program whose loops stack `kept`."""
    made = variant(compile_plan, policy or auto(STAYING), costs, "other stacks")
    return dataclasses.replace(made, program=dataclasses.replace(PROGRAM, kept=kept))


def test_what_a_compiled_step_tells_is_not_taken_for_another_form():
    """Costs are by step, and the steps of other forms have other numbers."""
    learned = []

    def learn(costs, step):
        del step
        learned.append(dataclasses.replace(costs, error=0.5))
        return learned[-1]

    mine = variant(over(lambda plan: 1000), auto(STAYING), STILL, learn=learn)
    asked = []

    class Asked(Recording):
        def plan(self, program, costs, budget):
            asked.append(costs)
            return super().plan(program, costs, budget)

    other = stacking(lambda plan: compiled(HIGH + 1000), policy=Asked(STAYING))
    find([family(mine), family(other)])
    assert learned and asked and not any(costs in learned for costs in asked)
