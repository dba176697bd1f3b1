"""search: what is compiled, in which order, and what is kept. The compiler is a function here."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import chain, unit_costs
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
    numbers,
    over,
    untouched,
    variant,
)

from vmem_jax import POLICIES
from vmem_jax.api.failure import budget_error
from vmem_jax.core.convolution import XLA, Configuration, Micro
from vmem_jax.core.need import need_nbytes
from vmem_jax.core.planned import predicted_need, simulate_plan
from vmem_jax.core.program import Kind
from vmem_jax.core.simulate import simulate
from vmem_jax.errors import CompileError, HostMemoryError, LayersError
from vmem_jax.policy import Keep
from vmem_jax.policy.base import Infeasible, Splitting, finish
from vmem_jax.policy.convolving import Convolving
from vmem_jax.policy.drop_order import order_with_drops
from vmem_jax.policy.recomputation import Recomputation
from vmem_jax.search.log import SearchLog, What
from vmem_jax.search.params import SearchParams
from vmem_jax.search.variant import MadeLater, Variant

PARAMS = SearchParams()


def needs(found):
    return [attempt.need for attempt in found.attempts]


def test_need_is_arguments_outputs_and_temporaries_less_aliases():
    assert need_nbytes(compiled(123)) == 123


def test_a_plan_that_fits_is_compiled_once():
    found = find(variant())
    assert found.fits and needs(found) == [found.best.need]
    assert found.best.plan.transfers and found.best.need <= BUDGET
    assert found.best.plan.budget == BUDGET


def test_without_a_budget_the_first_plan_is_taken():
    found = find(variant(over(lambda plan: 1000)), budget=None)
    assert found.fits and len(found.attempts) == 1 and found.best.plan.budget is None


# -- what compiles to too much


def test_the_excess_is_taken_off_what_is_planned_for():
    found = find(variant(over(lambda plan: 3)))
    assert 1 < len(found.attempts) <= PARAMS.compiles_per_variant
    assert found.attempts[0].need > BUDGET >= found.best.need
    assert found.best is found.attempts[-1] and found.best.plan.budget == BUDGET


def test_a_little_more_is_taken_off_for_each_plan_that_missed():
    """Every plan compiles to 1 B over the budget, so each is planned for as much less again."""
    policy = Recording(allow=STAYING)
    compile_plan = Compiler(lambda plan: BUDGET + 1)
    find(variant(compile_plan, policy, STILL), memory_step=0.1)
    peaks = [plan.predicted_peak for plan in compile_plan.plans]
    assert len(peaks) > 2 and peaks[0] > peaks[1] > peaks[2]


def test_after_a_miss_several_goals_are_planned_for_as_before_it():
    policy = Recording(allow=STAYING)
    found = find(variant(over(lambda plan: 3), policy, STILL))
    missed = found.attempts[0]
    goals = [int(share * (BUDGET - missed.excess)) for share in PARAMS.spread]
    assert missed.excess > 0 and set(goals) <= {asked for _, asked in policy.asked}


class Elsewhere(POLICIES["recompute"]):
    """Lowers some peak by as much as it is asked to, and not the highest by prediction."""

    name = "elsewhere"

    def plan(self, program, costs, budget):
        recomputation = Recomputation(program, tuple(range(len(program.steps))))
        idle = recomputation.idle()
        order = order_with_drops(recomputation, {idle[budget % len(idle)]})
        return finish("elsewhere", program, simulate(program, order, costs), budget)


def test_where_the_peak_is_not_where_it_is_predicted_what_is_missing_is_taken_off():
    """The lowest plan compiles to less than is predicted, and to 3 B more than are there."""
    short = lambda plan: 0 if plan.budget <= BUDGET - 3 else 3
    found = find(variant(Compiler(lambda plan: BUDGET + short(plan)), Elsewhere(), STILL))
    assert found.fits and needs(found) == [BUDGET + 3, BUDGET]
    assert all(attempt.predicted_need > BUDGET + 3 for attempt in found.attempts)


def test_the_compiled_steps_of_plans_that_missed_are_let_go():
    found = find(variant(over(lambda plan: 3)))
    assert found.best.compiled is not None
    assert all(attempt.compiled is None for attempt in found.attempts[:-1])


def test_plans_that_move_give_way_to_one_that_does_not():
    found = find(variant(over(lambda plan: 1000 if plan.transfers else 0)))
    assert found.fits and found.attempts[0].plan.transfers
    assert not found.best.plan.transfers


def test_what_moves_nothing_is_planned_for_the_whole_budget():
    policy = Recording()
    compile_plan = Compiler(lambda p: BUDGET + 1 if p.transfers else p.predicted_peak)
    found = find(variant(compile_plan, policy))
    assert found.fits and not found.best.plan.transfers
    assert (None, BUDGET) in policy.asked  # what transfers took beside is not taken off
    assert len(policy.asked) == len({*policy.asked})  # and nothing is planned twice


def test_no_plan_is_compiled_twice():
    """What compiles to too much is not compiled again, whatever it is planned for."""
    compile_plan = Compiler(lambda plan: HIGH + 1000)
    find(variant(compile_plan, auto(STAYING), STILL))
    facts = [(plan.order, plan.transfers) for plan in compile_plan.plans]
    assert len(facts) == len({*facts})


# -- the numbers of compiles


@pytest.mark.parametrize("families", [1, 2, 5])
@pytest.mark.parametrize("most, reserved", [(1, 0), (2, 1), (4, 3), (8, 3)])
def test_one_limit_counts_the_compiles_of_all_variants(families, most, reserved):
    compile_plan = over(lambda plan: 1000)
    group = [family(variant(compile_plan, auto(STAYING), slower(n))) for n in range(families)]
    params = {"max_compiles": most, "reserved_compiles": reserved}
    find(group, group, **params, without=untouched(compile_plan))
    assert 0 < len(compile_plan.plans) <= most


def slower(n):
    """Costs of a variant whose every step takes that much longer."""
    return dataclasses.replace(STILL, seconds=tuple((1 + n / 1000) * s for s in STILL.seconds))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_so_many_plans_of_a_variant_are_compiled_before_the_next_has_its_turn(most):
    """The first is predicted to be faster whatever is taken off, and never fits."""
    first, second = Compiler(lambda plan: BUDGET + 1), Compiler()
    group = [
        family(variant(first, auto(STAYING), STILL)),
        family(variant(second, auto(STAYING), slower(9_000), "second")),
    ]
    found = find(group, compiles_per_variant=most)
    assert found.fits and found.best.variant.name == "second"
    assert len(first.plans) == most and len(second.plans) == 1


def test_compiles_are_left_for_the_minimum_peak(heap):
    """All would go to the first variant; of the second all is predicted to need a little more than
    the budget, and it compiles to less than the first."""

    class Near(POLICIES["recompute"]):
        name = "near"

        def plan(self, program, costs, budget):
            plan = super().plan(program, costs, HIGH)
            return dataclasses.replace(plan, policy=self.name)

    near = lambda plan: BUDGET + 2 if plan.policy == "near" else plan.predicted_peak
    heap(lambda program, plan: near(plan))
    first, second = Compiler(lambda plan: BUDGET + 3), Compiler(lambda plan: BUDGET + 1)
    group = [
        family(variant(first, auto(STAYING), STILL)),
        family(variant(second, Near(), STILL)),
    ]
    params = {"max_compiles": 5, "compiles_per_variant": 9}
    found = find(group, **params, reserved_compiles=2)
    assert (len(first.plans), len(second.plans)) in ((3, 1), (4, 1))
    assert not found.fits and found.best.need == BUDGET + 1


# -- groups


def test_a_later_group_is_tried_only_where_nothing_of_the_first_fits():
    first, second = over(lambda plan: 1000), Compiler()
    group = variant(first, auto(STAYING), STILL), variant(second, auto(STAYING), STILL, "second")
    found = find(*group)
    assert found.fits and found.best.variant.name == "second"
    assert len(first.plans) > 0 < len(second.plans)

    policy = Recording(allow=STAYING)
    first, second = Compiler(), Compiler()
    found = find(variant(first, auto(STAYING), STILL), variant(second, policy, STILL))
    assert found.fits and len(first.plans) == 1
    assert not second.plans and not policy.asked


@pytest.mark.parametrize("may_gain, faster", [(False, 0.5), (True, 0.5), (True, 0.95)])
def test_a_later_group_that_may_gain_is_tried_though_something_fits(may_gain, faster):
    """Before anything is compiled, so that the fastest plan of all is compiled alone."""
    first, second, asked = Compiler(), Compiler(), []
    costs = dataclasses.replace(STILL, seconds=tuple(faster * s for s in STILL.seconds))
    later = family(variant(second, auto(STAYING), costs, "later"), must_gain=0.1)
    group = MadeLater(lambda: [later], lambda seconds: asked.append(seconds) or may_gain)
    found = find(variant(first, auto(STAYING), STILL), group)
    taken = may_gain and faster < 0.9
    assert found.fits and found.best.variant.name == ("later" if taken else "auto")
    assert (len(first.plans), len(second.plans)) == ((0, 1) if taken else (1, 0))
    [seconds] = {*asked}
    [plan] = first.plans or second.plans
    assert seconds == pytest.approx(plan.predicted_seconds / (faster if taken else 1))


@pytest.mark.parametrize("near, gain, is_first", [(1.5, 0, True), (1.0, 0, False), (1.5, 1, False)])
def test_where_a_plan_needs_nearly_the_budget_it_is_compiled_before_the_next_group(
    near, gain, is_first, heap
):
    """Of the first group all is predicted to need a little too much, and compiles to less; not where
    the next group is one that is tried where something fits, too."""
    low = lowest_plan(POLICIES["recompute"]())
    budget = low.predicted_peak - 1
    later = Compiler(lambda plan: budget)

    class Fits(POLICIES["recompute"]):
        name = "fits"

        def plan(self, program, costs, budget):
            return dataclasses.replace(super().plan(program, costs, HIGH), policy=self.name)

    needs = lambda plan: budget if plan.policy == "fits" else plan.predicted_peak
    heap(lambda program, plan: needs(plan))

    first = Compiler(lambda plan: budget)
    mine = variant(first, POLICIES["recompute"](), STILL, "first")
    group = [family(variant(later, Fits(), STILL, "later"), must_gain=0.1)]
    found = find(mine, MadeLater(lambda: group, lambda seconds: gain), budget=budget, near=near)
    assert found.fits and found.best.variant.name == ("first" if is_first else "later")
    assert (len(first.plans) > 0, len(later.plans) > 0) == (is_first, not is_first)


# -- what cannot be planned or compiled


def refuse(error):
    def compile_plan(plan):
        raise error

    return compile_plan


REFUSED = CompileError(name="step", message="refused")
HOST = HostMemoryError(nbytes=2, limit_nbytes=1, limit="a test")


@pytest.mark.parametrize("error", [REFUSED, HOST], ids=["xla", "host memory"])
def test_a_compile_that_fails_drops_its_variant_and_the_next_is_taken(error):
    log = SearchLog()
    group = [
        family(variant(refuse(error), auto(STAYING), STILL, "refused")),
        family(variant(None, auto(STAYING), slower(1), "next")),
    ]
    found = find(group, log=log)
    assert found.fits and found.best.variant.name == "next"
    (line,) = log.of(What.DROPPED)
    assert line.variant == "refused" and line.why == str(error).split("\n")[0]


@pytest.mark.parametrize("error", [REFUSED, HOST], ids=["xla", "host memory"])
def test_where_only_the_lowest_plans_are_left_a_failing_one_gives_way_to_the_next(error):
    budget, log = LOW + 1, SearchLog()
    good = Compiler(lambda plan: budget)
    group = [
        family(variant(refuse(error), POLICIES["recompute"](), STILL, "refused")),
        family(variant(good, POLICIES["recompute"](), slower(1), "next")),
    ]
    found = find(group, budget=budget, log=log)
    assert found.fits and found.best.variant.name == "next" and log.of(What.DROPPED)


@pytest.mark.parametrize("error", [REFUSED, HOST], ids=["xla", "host memory"])
def test_a_failing_compile_is_raised_where_nothing_else_is_there(error):
    with pytest.raises(type(error)):
        find(variant(refuse(error), auto(STAYING), STILL))


class Unlayered(POLICIES["recompute"]):
    """A policy that cannot plan for the program."""

    name = "unlayered"

    def plan(self, program, costs, budget):
        raise LayersError("no layers")


def test_a_policy_that_finds_no_layers_is_dropped_and_the_next_is_taken():
    log = SearchLog()
    group = [
        family(variant(None, Unlayered(), STILL, "unlayered")),
        family(variant(None, auto(STAYING), slower(1), "next")),
    ]
    found = find(group, log=log)
    assert found.fits and found.best.variant.name == "next"
    assert [line.variant for line in log.of(What.DROPPED)] == ["unlayered"]
    found = find(*[[each] for each in group])
    assert found.fits and found.best.variant.name == "next"


def test_that_a_policy_finds_no_layers_is_raised_where_nothing_else_is_there():
    with pytest.raises(LayersError):
        find(variant(None, Unlayered(), STILL))


class Lacking(POLICIES["recompute"]):
    """A policy that can do nothing for the program where it does not fit as it is."""

    name = "lacking"

    def plan(self, program, costs, budget):
        found = super().plan(program, costs, None)
        if budget is None or found.predicted_peak <= budget:
            return found
        return Infeasible(
            "lacking", budget, found.predicted_peak, "", plan=found, lacks="no layers"
        )


def test_what_a_step_lacks_is_said_once_it_does_not_fit_when_it_is_compiled_either():
    """It needs the budget to the byte, and is predicted to need more."""
    fits = Compiler(lambda plan: BUDGET)
    found = find(variant(fits, Lacking(), STILL))
    assert found.fits and found.best.predicted_need > BUDGET
    only_plain = Compiler(lambda plan: BUDGET + plan.fenced)
    found = find(variant(only_plain, Lacking(), STILL), without=untouched(only_plain))
    assert found.fits and not found.best.plan.fenced
    above = Compiler(lambda plan: BUDGET + 1)
    with pytest.raises(LayersError, match="no layers"):
        find(variant(above, Lacking(), STILL), without=untouched(above))
    also_able = [family(variant(above, Lacking(), STILL)), family(variant(above, auto(STAYING)))]
    assert not find(also_able).fits


def test_what_another_policy_says_stands_where_one_finds_no_layers():
    """Nothing fits, so the peak of the one that plans is named and not why the other cannot."""
    group = [
        family(variant(None, Unlayered(), STILL)),
        family(variant(Compiler(), POLICIES["recompute"](), STILL)),
    ]
    found = find(group, budget=LOW + 1)
    assert not found.fits and found.best is not None


# -- the untouched program


def test_the_untouched_program_runs_where_only_it_fits():
    compile_plan = over(lambda plan: 1000 if plan.fenced else BUDGET - plan.predicted_peak)
    found = find(variant(compile_plan), without=untouched(compile_plan))
    assert found.fits and not found.best.plan.fenced and found.best.plan.policy == "keep"
    assert found.best.need == BUDGET


@pytest.mark.parametrize("most", [1, 2, 4, 8])
def test_a_compile_is_left_for_the_untouched_program(most):
    """It bounds the lowest peak, whatever the other plans compile to."""
    compile_plan = over(lambda plan: 1000 if plan.fenced else BUDGET + 1 - plan.predicted_peak)
    group = [family(variant(compile_plan, auto(STAYING), slower(n))) for n in range(5)]
    found = find(group, max_compiles=most, without=untouched(compile_plan))
    assert not found.fits and not found.best.plan.fenced
    assert found.best.need == BUDGET + 1
    assert len(compile_plan.plans) <= most


def test_an_error_names_no_more_than_plain_needs_however_much_that_is_predicted_to_need():
    """XLA fuses what is predicted as arrays: small products compiled to a fifth of the prediction."""
    plain, program = HIGH // 2, chain(60, 4)
    compile_plan = over(lambda plan_: plain + plan_.fenced - plan_.predicted_peak)
    without = Variant("keep", program, Keep(), unit_costs(program), compile_plan, compile_plan)
    assert simulate(program, range(len(program.steps)), without.costs).peak > 5 * plain
    found = find(variant(compile_plan, auto(STAYING)), budget=plain - 1, without=without)
    assert not found.fits
    assert found.best.need == plain and not found.best.plan.fenced


def test_the_untouched_program_is_not_compiled_where_its_arguments_and_outputs_are_too_much():
    compile_plan = over(lambda plan: LOW - plan.predicted_peak)
    one = variant(compile_plan, POLICIES["recompute"](), STILL)
    found = find(one, budget=LOW - 1, without=untouched(compile_plan))
    assert not found.fits and all(plan.fenced for plan in compile_plan.plans)


def test_constants_do_not_keep_the_untouched_program_from_being_compiled():
    """XLA keeps them with the code: a step on 18 KiB of them needed 20 KiB, and 37 were predicted."""
    [first, *others] = PROGRAM.buffers
    assert 0 in PROGRAM.inputs
    constant = dataclasses.replace(first, nbytes=2 * HIGH, kind=Kind.CONSTANT)
    program = dataclasses.replace(PROGRAM, buffers=(constant, *others))
    compile_plan = over(lambda plan: HIGH - plan.fenced - plan.predicted_peak)
    without = Variant("keep", program, Keep(), unit_costs(program), compile_plan, compile_plan)
    above = variant(over(lambda plan: HIGH + 9 - plan.predicted_peak), auto(STAYING))
    found = find(above, budget=LOW, without=without)
    assert not found.fits and not found.best.plan.fenced and found.best.need == HIGH


def test_the_untouched_program_is_not_compiled_where_its_need_is_known_to_be_too_much():
    compile_plan = over(lambda plan: 1000)
    known = {"without": untouched(compile_plan), "plain_need": HIGH + 2000}
    found = find(variant(compile_plan), **known)
    assert not found.fits and compile_plan.plans
    assert all(plan.fenced for plan in compile_plan.plans)


# -- where nothing fits


def error_of(found, budget, policy="auto"):
    return budget_error(policy, budget, found, resident=0)


def test_nothing_over_the_budget_fits_and_the_error_names_the_lowest():
    compile_plan = over(lambda plan: 1000)
    found = find(variant(compile_plan), plain_need=HIGH + 1000)
    assert not found.fits
    error = error_of(found, BUDGET)
    assert error.compiled and error.lowest_peak == min(needs(found)) > BUDGET
    assert error.lowest_plan.budget == error.lowest_peak


@pytest.mark.parametrize("badly", [True, False])
def test_the_minimum_peak_where_the_lowest_plan_compiles_badly(badly):
    """The plan with the lowest predicted peak recomputes the most, and XLA makes the least of it."""
    policy, budget = POLICIES["recompute"](), LOW + 1
    least = lowest_plan(policy).predicted_peak
    times = lambda plan: 3 if badly and plan.predicted_peak == least else 1
    compile_plan = Compiler(lambda plan: times(plan) * plan.predicted_peak)
    found = find(variant(compile_plan, policy, STILL), budget=budget)
    asked = [plan.predicted_peak for plan in compile_plan.plans]
    assert asked[0] == least and len(asked) == (2 if badly else 1)
    error = error_of(found, budget, "recompute")
    assert error.compiled and error.lowest_peak == asked[-1] <= 1.25 * least


def falling(count, lowest_of, compile_plan):
    """A family of one variant whose lowest plan is for `lowest_of(count)` bytes; nothing fits."""
    plan = POLICIES["recompute"]().plan(PROGRAM, STILL, lowest_of(count))

    class Falling(POLICIES["recompute"]):
        name = "falling"

        def plan(self, program, costs, budget):
            return Infeasible("falling", budget, plan.predicted_peak, "", plan=plan)

    return family(variant(compile_plan, Falling(), STILL, f"falling{count}"))


@pytest.mark.parametrize("less, compiles", [(0.0, 2), (0.005, 2), (0.05, 4)])
def test_lowest_plans_that_compile_to_as_much_are_not_tried_further(less, compiles):
    nbytes = lambda plan: int(100_000 * (1 - less) ** (len(compile_plan.plans) - 1))
    compile_plan = Compiler(nbytes)
    group = [falling(n, lambda n: HIGH - (HIGH - LOW) * n // 6, compile_plan) for n in range(4)]
    found = find(group, budget=LOW + 1, less_extreme=())
    assert len(compile_plan.plans) == compiles
    assert found.best.need == min(needs(found)) == int(100_000 * (1 - less) ** (compiles - 1))


@pytest.mark.parametrize("same, fits, taken", [(0.5, 2, 1), (0.5, 1, 0), (0.999, 2, 0)])
def test_of_plans_that_need_about_as_much_and_fit_the_fastest_is_compiled_last(same, fits, taken):
    """The compiles that were left for the lowest peak: of the lowest plans the second is faster."""
    compile_plan = Compiler()
    plans = [POLICIES["recompute"]().plan(PROGRAM, STILL, n) for n in (BUDGET, HIGH - 1)]
    plans = [
        dataclasses.replace(p, predicted_seconds=n) for p, n in zip(plans, (9.0, 5.0), strict=True)
    ]
    needs = [predicted_need(PROGRAM, p) for p in plans]
    assert needs[0] < needs[1] < 2 * needs[0]

    def fixed(plan, name):
        class Fixed(POLICIES["recompute"]):
            def plan(self, program, costs, budget):
                return plan

        return family(variant(compile_plan, Fixed(), STILL, name))

    group = [fixed(plan, f"plan {i}") for i, plan in enumerate(plans)]
    found = find(group, budget=needs[fits - 1], reserved_compiles=8, same=same)
    assert found.fits and found.best.plan.predicted_seconds == (9.0, 5.0)[taken]
    assert len(compile_plan.plans) == 1


def test_a_lowest_plan_is_not_compiled_where_another_came_to_less_than_is_predicted_for_it():
    compile_plan = Compiler(lambda plan: LOW + 2)
    group = [falling(n, lambda n: BUDGET + 2 * n, compile_plan) for n in range(3)]
    found = find(group, budget=LOW + 1)
    assert len(compile_plan.plans) == 1 and found.best.need == LOW + 2


@pytest.mark.parametrize("known", ["of the lowest", "of the others"])
def test_no_other_plan_is_compiled_where_heaps_tell_that_it_is_no_lower(heap, known):
    """The lowest compiles to three times its peak, which its heap tells; or theirs are as large."""
    policy = POLICIES["recompute"]()
    least = lowest_plan(policy).predicted_peak
    large = lambda plan: (plan.predicted_peak == least) == (known == "of the lowest")
    heap(lambda program, plan: (4 if large(plan) else 1) * plan.predicted_peak)
    compile_plan = Compiler(lambda plan: 3 * least)
    found = find(variant(compile_plan, policy, STILL), budget=LOW + 1)
    assert [plan.predicted_peak for plan in compile_plan.plans] == [least]
    assert found.best.need == 3 * least


# -- what compiled steps tell


def test_what_the_first_compiled_step_tells_is_planned_with():
    """A convolution turns out to have a workspace where the peak is; the next plan makes room."""
    order = range(len(PROGRAM.steps))
    s = simulate(PROGRAM, order, FAST).peak_at
    own = Configuration((Micro(1, XLA, (), (HIGH - LOW) // 4, FAST.seconds[s]),))
    learn = lambda costs, compiled: dataclasses.replace(costs, convolutions={s: (own,)})
    there = lambda plan: dataclasses.replace(plan, convolutions=((s, own),))
    compile_plan = lambda plan: compiled(simulate_plan(PROGRAM, there(plan), FAST).peak)
    one = variant(compile_plan, Convolving(auto(STAYING)), learn=learn)
    found = find(one, budget=HIGH)
    assert found.fits
    assert [a.costs.convolutions for a in found.attempts] == [{s: (own,)}] * len(found.attempts)
    first, *_, last = found.attempts
    assert first.need > HIGH == first.plan.predicted_peak
    assert last.need == last.plan.predicted_peak <= HIGH  # nothing is taken off for no reason


def learning(slower, *others):
    """Costs in which XLA's own convolution of the longest step takes as long as it does, and what
    learns from a compiled step that it takes `slower` times as long; `others` take so much longer."""
    s = max(range(len(FAST.seconds)), key=FAST.seconds.__getitem__)
    took = lambda part, engine: Micro(1, engine, (), 0, part * FAST.seconds[s])
    front = [Configuration((took(1 + extra, 1),)) for extra in others]
    by = lambda part: {s: (Configuration((took(part, XLA),)), *front)}
    costs = dataclasses.replace(FAST, convolutions=by(1.0))
    return costs, lambda costs, compiled: dataclasses.replace(costs, convolutions=by(slower))


def test_a_plan_that_fits_gives_way_where_its_compiled_step_tells_that_it_is_slower():
    costs, learn = learning(9.0)
    policy = Convolving(auto(STAYING))
    steady = lambda of: dataclasses.replace(of, seconds=tuple(1.2 * t for t in of.seconds))
    first = variant(Compiler(lambda plan: HIGH), policy, costs, learn=learn)
    second = variant(Compiler(lambda plan: HIGH), auto(STAYING), steady(FAST))
    found = find([family(first), family(second)], budget=HIGH)
    assert [a.variant.costs for a in found.attempts] == [costs, second.costs]
    assert found.best.variant is second
    slow = found.attempts[0]
    assert slow.plan.predicted_seconds == simulate_plan(PROGRAM, slow.plan, slow.costs).seconds
    assert slow.plan.predicted_seconds > found.best.plan.predicted_seconds


def test_a_plan_that_fits_is_planned_again_where_its_compiled_step_tells_that_it_is_slower():
    costs, learn = learning(9.0, 0.3)
    compile_plan = Compiler(lambda plan: HIGH)
    one = variant(compile_plan, Convolving(auto(STAYING)), costs, learn=learn)
    found = find(one, budget=HIGH)
    first, last = (plan.convolutions[0][1] for plan in compile_plan.plans)
    assert first.is_xlas and not last.is_xlas
    assert found.best.plan.schedule == compile_plan.plans[-1].schedule


def test_the_minimum_peak_is_planned_with_what_the_first_compiled_step_tells():
    """Nothing fits. XLA's own convolution turns out to take a workspace where the peak of the lowest
    plan is, and in micro-batches it would take less."""
    policy = POLICIES["recompute"]()
    lowest = lowest_plan(policy)
    timeline = simulate(PROGRAM, lowest.order, STILL)
    s = timeline.order[timeline.peak_at]
    own = Configuration((Micro(2, XLA, (), 0, 1.0),))
    large = Configuration((Micro(2, XLA, (), 40, 1.0),))
    parts = Configuration((Micro(1, 1, (), 1, 1.0), Micro(1, 1, (), 1, 1.0)))
    costs = dataclasses.replace(STILL, convolutions={s: (own, parts)})
    learn = lambda costs, compiled: dataclasses.replace(costs, convolutions={s: (large, parts)})

    def need(plan):
        chosen = dict(plan.convolutions).get(s)
        done = parts if chosen is not None and chosen.calls == parts.calls else large
        there = dataclasses.replace(plan, convolutions=((s, done),))
        return simulate_plan(PROGRAM, there, STILL).peak

    one = variant(Compiler(need), Convolving(policy), costs, learn=learn)
    found = find(one, budget=LOW + 1, less_extreme=())
    assert not found.fits
    assert found.best.need < lowest.predicted_peak + 40


def test_a_lowest_plan_that_nearly_fits_is_planned_again_for_less():
    """Its policy names a plan for what it is asked for and says that it needs too much."""

    class Gloomy(POLICIES["recompute"]):
        name = "gloomy"

        def plan(self, program, costs, budget):
            plan = super().plan(program, costs, budget)
            plan = plan.plan if isinstance(plan, Infeasible) else plan
            return Infeasible(self.name, budget, 2 * budget, "", plan=plan)

    compile_plan = over(lambda plan: 1)
    budget = Gloomy().plan(PROGRAM, STILL, BUDGET).plan.predicted_peak
    found = find(variant(compile_plan, Gloomy(), STILL), budget=budget)
    assert found.fits and len(compile_plan.plans) > 1


def test_a_variant_that_compiled_to_less_than_predicted_is_expected_to_do_so_again():
    """Its next plan is predicted to need more than the first compiled to, and compiles to less."""
    plans = [POLICIES["recompute"]().plan(PROGRAM, STILL, n) for n in range(HIGH - 1, LOW, -1)]
    plans = [p for p in plans if not isinstance(p, Infeasible)]
    first = plans[0]
    least = predicted_need(PROGRAM, first)
    second = next(p for p in plans if predicted_need(PROGRAM, p) < least)
    assert predicted_need(PROGRAM, second) > 0.77 * least
    left = [first, second, second]

    class Falling(POLICIES["recompute"]):
        name = "falling"

        def plan(self, program, costs, budget):
            plan = left.pop(0) if len(left) > 1 else left[0]
            return Infeasible("falling", budget, plan.predicted_peak, "", plan=plan)

    compile_plan = Compiler(lambda plan: int(0.7 * predicted_need(PROGRAM, plan)))
    budget = int(0.7 * predicted_need(PROGRAM, second))
    found = find(variant(compile_plan, Falling(), STILL), budget=budget)
    assert found.fits and compile_plan.plans[-1].schedule == second.schedule


def predicting(heap, predicted, excess, alike):
    """Families, each of a policy by the first word of its name, whose every plan is `predicted` to
    need so much, compiles to so much more, and of which some are alike; and their compilers."""

    def policy(own):
        class Fixed(POLICIES["recompute"]):
            name = own.split()[0]

            def plan(self, program, costs, budget):
                plan = dataclasses.replace(super().plan(program, costs, HIGH), policy=own)
                if budget is not None and budget < predicted[own]:
                    return Infeasible(own, budget, predicted[own], "somewhere", plan=plan)
                return plan

        return Fixed()

    heap(lambda program, plan: predicted[plan.policy])
    need = lambda plan: predicted[plan.policy] + excess[plan.policy]
    compilers = {name: Compiler(need) for name in predicted}
    group = [
        family(variant(compilers[name], policy(name), slower(n), name), alike=name in alike)
        for n, name in enumerate(predicted)
    ]
    return group, compilers


@pytest.mark.parametrize("alike", [True, False])
def test_what_one_variant_took_too_much_is_taken_off_for_those_like_it(heap, alike):
    predicted = {"first": BUDGET - 1, "second": BUDGET - 2, "third": BUDGET - 40}
    excess = dict.fromkeys(predicted, 30)
    group, compilers = predicting(heap, predicted, excess, [*predicted] if alike else [])
    found = find(group)
    assert found.fits and found.best.variant.name == "third"
    compiles = [len(compiler.plans) for compiler in compilers.values()]
    assert compiles == [1, 0 if alike else 1, 1]


@pytest.mark.parametrize(("counts", "compiles"), [((2, 4, 8), [1, 0, 1]), ((1, 4, 8), [1, 1, 1])])
def test_what_some_sub_batches_took_too_much_is_taken_off_for_other_numbers(heap, counts, compiles):
    """What the whole batch took too much says nothing of them: it runs in no loop."""
    predicted = {"first": BUDGET - 1, "second": BUDGET - 2, "third": BUDGET - 40}
    group, compilers = predicting(heap, predicted, dict.fromkeys(predicted, 30), [])
    variants = dict(zip(counts, (one.make(1) for one in group), strict=True))
    found = find([numbers(variants, splitting=Splitting.FASTEST, alike=True)])
    assert found.fits and found.best.variant.name == "third"
    assert [len(compiler.plans) for compiler in compilers.values()] == compiles


def test_the_lowest_plans_are_ordered_by_their_own_predictions(heap):
    """What another took too much says how much to plan for, not which plan is lower."""
    predicted = {"first": BUDGET - 1, "second": BUDGET + 2, "other": BUDGET + 10}
    excess = {"first": 30, "second": 1, "other": 1}
    group, compilers = predicting(heap, predicted, excess, ["first", "second"])
    found = find(group)
    assert not found.fits and found.best.need == BUDGET + 3
    assert not compilers["other"].plans


def test_other_plans_of_a_policy_whose_predictions_are_far_off_are_compiled_last(heap):
    """All are predicted to fit, and compiles are left for the lowest alone."""
    predicted = {"far 1": BUDGET - 3, "far 2": BUDGET - 2, "near": BUDGET - 1}
    excess = {"far 1": BUDGET, "far 2": BUDGET, "near": 0}
    group, compilers = predicting(heap, predicted, excess, [])
    found = find(group, reserved_compiles=8)
    assert found.fits and found.best.variant.name == "near"
    assert [len(compiler.plans) for compiler in compilers.values()] == [1, 0, 1]
