"""prove: what is compiled, in which order, and what is kept. The compiler is a function here."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from helpers import SHAPES, unit_costs
from vmem_jax.prove import placed as placing
from vmem_jax.prove.placed import planned
from vmem_jax.prove.prove import MOST_COMPILES, need_nbytes, prove
from vmem_jax.prove.sub_batches import Member, prove_in_parts

from vmem_jax import POLICIES, BudgetError
from vmem_jax.core.convolution import XLA, Configuration, Micro
from vmem_jax.core.costs import Link
from vmem_jax.core.planned import simulate_plan
from vmem_jax.core.simulate import simulate
from vmem_jax.policy.convolving import Convolving

PROGRAM = SHAPES["chain"]
FAST = dataclasses.replace(unit_costs(PROGRAM), link=Link(1e6, 1e6, 2e6))
LOW = PROGRAM.resident_nbytes
HIGH = simulate(PROGRAM, range(len(PROGRAM.steps)), FAST).peak
BUDGET = (LOW + HIGH) // 2


def compiled(nbytes):
    """What a compiled step says of its memory."""
    stats = SimpleNamespace(
        argument_size_in_bytes=nbytes - 10,
        output_size_in_bytes=7,
        alias_size_in_bytes=2,
        temp_size_in_bytes=5,
    )
    return SimpleNamespace(memory_analysis=lambda: stats)


def attempts(excess, *, allow=("order", "recompute", "offload"), budget=BUDGET, plain_need=None):
    """The attempts under a compiler that needs `excess(plan)` more than predicted."""
    compile_plan = lambda plan: compiled(plan.predicted_peak + excess(plan))
    return prove(PROGRAM, POLICIES["auto"](allow=allow), FAST, budget, compile_plan, plain_need)


def test_need_is_arguments_outputs_and_temporaries_less_aliases():
    assert need_nbytes(compiled(123)) == 123


def test_a_plan_that_fits_is_compiled_once():
    (attempt,) = attempts(lambda plan: 0)
    assert attempt.plan.transfers and attempt.need <= BUDGET


def test_the_excess_is_taken_off_what_is_planned_for():
    found = attempts(lambda plan: 3)
    assert 1 < len(found) <= MOST_COMPILES
    assert found[-1].need <= BUDGET and found[-1].plan.budget == BUDGET


@pytest.mark.parametrize("lost", [3, lambda plan: 3 if plan.transfers else 9])
@pytest.mark.parametrize("long", [True, False])
def test_what_the_heap_takes_is_taken_off_before_anything_is_compiled(monkeypatch, lost, long):
    """Of a heap that takes more than is live, more of some plans, the first compile fits."""
    asked = []

    class Recording(POLICIES["auto"]):
        def plan(self, program, costs, budget):
            asked.append(super().plan(program, costs, budget))
            return asked[-1]

    more = lost if callable(lost) else lambda plan: lost
    need = lambda program, plan: plan.predicted_peak + more(plan)
    monkeypatch.setattr(placing, "predicted_need", need)
    monkeypatch.setattr(placing, "_LONG", 0 if long else 1000)
    compile_plan = lambda plan: compiled(need(PROGRAM, plan))
    policy = Recording(allow=("order", "recompute", "offload"))
    (attempt,) = prove(PROGRAM, policy, FAST, BUDGET, compile_plan)
    assert attempt.need == attempt.predicted_need <= BUDGET
    assert asked[0].predicted_peak + more(asked[0]) > BUDGET  # the first plan was not it
    fitting = [plan for plan in asked if need(PROGRAM, plan) <= BUDGET]
    assert attempt.plan.predicted_seconds == min(plan.predicted_seconds for plan in fitting)
    assert len(fitting) == 1 or not long


def test_the_lowest_plan_is_looked_at_where_nothing_lower_can_be_planned(monkeypatch):
    """Every other plan is placed far above what is live at once."""
    policy = POLICIES["recompute"]()
    with pytest.raises(BudgetError) as error:
        policy.plan(PROGRAM, FAST, LOW + 1)
    lowest = error.value.lowest_plan
    need = lambda program, plan: plan.predicted_peak + (0 if plan.order == lowest.order else HIGH)
    monkeypatch.setattr(placing, "predicted_need", need)
    assert policy.plan(PROGRAM, FAST, BUDGET).order != lowest.order
    compile_plan = lambda plan: compiled(need(PROGRAM, plan))
    (attempt,) = prove(PROGRAM, policy, FAST, BUDGET, compile_plan)
    assert attempt.plan.order == lowest.order and attempt.need <= BUDGET


def test_plans_that_move_give_way_to_one_that_does_not():
    found = attempts(lambda plan: 1000 if plan.transfers else 0)
    assert found[0].plan.transfers and not found[-1].plan.transfers
    assert found[-1].need <= BUDGET


def test_the_last_try_moves_nothing_and_no_try_is_planned_twice():
    asked = []

    class Recording(POLICIES["auto"]):
        def plan(self, program, costs, budget):
            asked.append((costs.link, budget))
            return super().plan(program, costs, budget)

    compile_plan = lambda p: compiled(BUDGET + 1 if p.transfers else p.predicted_peak)
    found = prove(PROGRAM, Recording(), FAST, BUDGET, compile_plan)
    assert len(found) == MOST_COMPILES == len(asked)
    assert all(attempt.plan.transfers for attempt in found[:-1])
    assert not found[-1].plan.transfers and asked[-1] == (None, BUDGET)


def test_the_untouched_program_runs_where_only_it_fits():
    found = attempts(lambda plan: 1000 if plan.fenced else BUDGET - plan.predicted_peak)
    assert not found[-1].plan.fenced and found[-1].plan.policy == "keep"
    assert found[-1].need == BUDGET


def test_the_untouched_program_is_not_compiled_where_it_is_far_too_large():
    asked, budget = [], LOW + 1
    assert HIGH > 2 * budget

    def compile_plan(plan):
        asked.append(plan)
        return compiled(plan.predicted_peak)

    with pytest.raises(BudgetError):
        prove(PROGRAM, POLICIES["recompute"](), FAST, budget, compile_plan)
    assert asked and all(plan.fenced for plan in asked)


def test_nothing_over_the_budget_is_returned():
    with pytest.raises(BudgetError) as caught:
        attempts(lambda plan: 1000, plain_need=HIGH + 1000)
    assert caught.value.lowest_peak > BUDGET


@pytest.mark.parametrize("badly", [True, False])
def test_an_error_names_what_is_reached_where_the_lowest_plan_compiles_badly(badly):
    """The plan with the lowest predicted peak recomputes the most, and XLA makes the least of it."""
    policy, budget, asked = POLICIES["recompute"](), LOW + 1, []
    with pytest.raises(BudgetError) as predicted:
        policy.plan(PROGRAM, FAST, budget)
    least = predicted.value.lowest_peak

    def compile_plan(plan):
        asked.append(plan.predicted_peak)
        is_extreme = plan.predicted_peak == least
        return compiled(plan.predicted_peak * (3 if badly and is_extreme else 1))

    with pytest.raises(BudgetError) as caught:
        prove(PROGRAM, policy, FAST, budget, compile_plan, plain_need=HIGH)
    assert asked[0] == least and len(asked) == (2 if badly else 1)
    assert caught.value.compiled and caught.value.lowest_peak == asked[-1] <= 1.25 * least


@pytest.mark.parametrize("less, compiles", [(0.0, 2), (0.005, 2), (0.05, MOST_COMPILES)])
def test_lowest_plans_that_compile_to_as_much_are_not_tried_further(less, compiles):
    needs = []

    class Falling(POLICIES["recompute"]):
        """Nothing fits, and every time another plan is its lowest."""

        def plan(self, program, costs, budget):
            plan = super().plan(program, costs, HIGH - (HIGH - LOW) * len(needs) // 6)
            raise BudgetError(
                policy="falling", budget=budget, lowest_peak=HIGH, at="", lowest_plan=plan
            )

    def compile_plan(plan):
        needs.append(int(100_000 * (1 - less) ** len(needs)))
        return compiled(needs[-1])

    with pytest.raises(BudgetError) as caught:
        prove(PROGRAM, Falling(), FAST, BUDGET, compile_plan, plain_need=200_000)
    assert len(needs) == compiles and caught.value.lowest_peak == needs[-1]


def test_a_lowest_plan_is_not_compiled_where_another_came_to_less_than_is_predicted_for_it():
    asked = []

    class Rising(POLICIES["recompute"]):
        """Nothing fits, and every plan that is its lowest is predicted to need more."""

        def plan(self, program, costs, budget):
            plan = super().plan(program, costs, BUDGET + 2 * len(asked))
            raise BudgetError(
                policy="rising", budget=budget, lowest_peak=HIGH, at="", lowest_plan=plan
            )

    def compile_plan(plan):
        asked.append(plan)
        return compiled(LOW + 2)

    with pytest.raises(BudgetError) as caught:
        prove(PROGRAM, Rising(), FAST, LOW + 1, compile_plan, plain_need=HIGH)
    assert len(asked) == 1 and caught.value.lowest_peak == LOW + 2


@pytest.mark.parametrize("known", ["of the lowest", "of the others"])
def test_no_other_plan_is_compiled_where_heaps_tell_that_it_is_no_lower(monkeypatch, known):
    """The lowest compiles to three times its peak, which its heap tells; or theirs are as large."""
    policy, asked = POLICIES["recompute"](), []
    with pytest.raises(BudgetError) as predicted:
        policy.plan(PROGRAM, FAST, LOW + 1)
    least = predicted.value.lowest_peak
    large = lambda plan: (plan.predicted_peak == least) == (known == "of the lowest")
    need = lambda program, plan: (4 if large(plan) else 1) * plan.predicted_peak
    monkeypatch.setattr(placing, "predicted_need", need)

    def compile_plan(plan):
        asked.append(plan.predicted_peak)
        return compiled(3 * least)

    with pytest.raises(BudgetError) as caught:
        prove(PROGRAM, policy, FAST, LOW + 1, compile_plan, plain_need=HIGH)
    assert asked == [least] and caught.value.lowest_peak == 3 * least


def test_what_the_first_compiled_step_teaches_is_planned_with():
    """A convolution turns out to have a workspace where the peak is; the next plan makes room."""
    order = range(len(PROGRAM.steps))
    s = simulate(PROGRAM, order, FAST).peak_at
    own = Configuration((Micro(1, XLA, (), (HIGH - LOW) // 4, FAST.seconds[s]),))
    learn = lambda costs, compiled: dataclasses.replace(costs, convolutions={s: (own,)})
    there = lambda plan: dataclasses.replace(plan, convolutions=((s, own),))
    compile_plan = lambda plan: compiled(simulate_plan(PROGRAM, there(plan), FAST).peak)
    policy = Convolving(POLICIES["auto"](allow=("order", "recompute")))
    found = prove(PROGRAM, policy, FAST, HIGH, compile_plan, learn=learn)
    assert [a.costs.convolutions for a in found] == [{s: (own,)}] * len(found)
    first, *_, last = found
    assert first.need > HIGH == first.plan.predicted_peak
    assert last.need == last.plan.predicted_peak <= HIGH  # nothing is taken off for no reason


def test_what_was_planned_already_is_not_planned_again():
    asked = []

    class Recording(POLICIES["auto"]):
        def plan(self, program, costs, budget):
            asked.append(budget)
            return super().plan(program, costs, budget)

    first = dataclasses.replace(planned(PROGRAM, Recording(), FAST, BUDGET), seconds=2.0)
    for excess, plans in ((0, 0), (3, 1)):  # the next attempt is planned for less
        asked.clear()
        compile_plan = lambda plan, excess=excess: compiled(plan.predicted_peak + excess)
        found = prove(PROGRAM, Recording(), FAST, BUDGET, compile_plan, first=first)
        attempt = min(found, key=lambda attempt: -attempt.plan_seconds)
        assert attempt.plan.order == first.plan.order and attempt.plan_seconds >= 2.0
        assert (len(asked) > 0) == plans == (len(found) > 1)


@pytest.mark.parametrize(
    "excess, expected, tried",
    [
        ({1: 0, 2: 0}, 1, {1}),  # as fast as predicted
        ({1: 8, 2: 0}, 2, {1, 2}),  # 32 s are predicted at first and 45 in the end; two take 35
        ({1: 8, 2: 8}, 1, {1, 2}),  # 50
        ({1: 1000, 2: 0}, 2, {1, 2}),  # does not fit
        ({1: 1000, 2: 1000, 4: 1000, 8: 0, 16: 0, 32: 0}, 32, {1, 2, 4, 32}),  # none of three does
        ({1: 1000, 2: 0, 4: 0, 8: 0, 16: 0, 32: 0}, 2, {1, 2, 4}),
    ],
)
def test_the_next_number_of_sub_batches_where_the_proof_of_one_ends_badly(excess, expected, tried):
    still = dataclasses.replace(FAST, link=None)
    policy = POLICIES["auto"](allow=("order", "recompute"))
    seen = set()

    def member(count):
        seconds = tuple((0.9 + 0.1 * count) * s for s in still.seconds)

        def compile_plan(plan):
            seen.add(count)
            return compiled(plan.predicted_peak + excess[count])

        return Member(PROGRAM, policy, dataclasses.replace(still, seconds=seconds), compile_plan)

    count, found = prove_in_parts(member, [*excess], BUDGET)
    assert (count, seen) == (expected, tried)
    assert found[-1].need <= BUDGET


def test_numbers_that_a_bound_rules_out_are_not_planned():
    """One sub-batch takes some 32 s; of two the bound says so much more, of four it does not."""
    still = dataclasses.replace(FAST, link=None)
    asked = []

    @dataclasses.dataclass(frozen=True)
    class Recording(POLICIES["auto"]):
        count: int = 1
        bound: float = 0.0

        def lower_bound_seconds(self, program, costs, budget):
            return self.bound if budget else 0.0

        def plan(self, program, costs, budget):
            asked.append(self.count)
            return super().plan(program, costs, budget)

    def members(bounds, excess):
        compile_plan = lambda count, plan: compiled(plan.predicted_peak + excess[count])
        return lambda count: Member(
            PROGRAM,
            Recording(allow=("order", "recompute"), count=count, bound=bounds[count]),
            still,
            lambda plan: compile_plan(count, plan),
        )

    bounds, fits = {1: 0.0, 2: 1000.0, 4: 0.0}, {1: 0, 2: 0, 4: 0}
    assert prove_in_parts(members(bounds, fits), [1, 2, 4], BUDGET)[0] == 1
    assert {*asked} == {1, 4}
    count, _ = prove_in_parts(members(bounds, {1: 1000, 2: 0, 4: 1000}), [1, 2, 4], BUDGET)
    assert count == 2  # and where nothing else fits, it is proved all the same


@pytest.mark.parametrize("long", [True, False])
def test_numbers_are_ranked_by_what_fits_as_placed(monkeypatch, long):
    """Two are predicted to be faster, but whatever is planned for them the heap loses too much."""
    still = dataclasses.replace(FAST, link=None)

    class Lossy(POLICIES["auto"]):
        name = "lossy"

    need = lambda program, plan: plan.predicted_peak + 1000 * (plan.policy == "lossy")
    monkeypatch.setattr(placing, "predicted_need", need)
    monkeypatch.setattr(placing, "_LONG", 0 if long else 1000)
    seen = []

    def member(count):
        policy = (Lossy if count == 2 else POLICIES["auto"])(allow=("order", "recompute"))
        costs = dataclasses.replace(still, seconds=tuple(s / count for s in still.seconds))
        compile_plan = lambda plan: seen.append(count) or compiled(need(PROGRAM, plan))
        return Member(PROGRAM, policy, costs, compile_plan)

    count, found = prove_in_parts(member, [1, 2], BUDGET)
    assert (count, seen) == (1, [1]) and found[-1].need <= BUDGET


def test_where_no_number_fits_the_one_that_needs_the_least_as_placed_is_proved(monkeypatch):
    """Of one sub-batch nearly the budget is live at the least, and the heap loses much of it; what
    is planned for two is predicted to need a little more than the budget, and packed better."""
    still = dataclasses.replace(FAST, link=None)
    low = POLICIES["auto"](allow=("order", "recompute")).plan(PROGRAM, still, BUDGET)

    class Short(POLICIES["auto"]):
        name = "short"

        def plan(self, program, costs, budget):
            lowest = dataclasses.replace(low, policy="short")
            means = {"policy": self.name, "budget": BUDGET, "lowest_peak": BUDGET + 1}
            raise BudgetError(**means, at="here", lowest_plan=lowest)

    need = lambda program, plan: BUDGET + (1000 if plan.policy == "short" else 3)
    monkeypatch.setattr(placing, "predicted_need", need)

    def member(count):
        policy = (Short if count == 1 else POLICIES["auto"])(allow=("order", "recompute"))
        return Member(PROGRAM, policy, still, lambda plan: compiled(plan.predicted_peak))

    assert prove_in_parts(member, [1, 2], BUDGET)[0] == 2
