"""The variants that the search chooses from: numbers of sub-batches, other policies, bounds."""

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
    Splitting,
    auto,
    family,
    find,
    numbers,
    over,
    variant,
)

from vmem_jax import POLICIES
from vmem_jax.errors import CompileError
from vmem_jax.policy.base import Infeasible
from vmem_jax.policy.streaming import Streaming
from vmem_jax.search.log import SearchLog, What
from vmem_jax.search.variant import Family

AUTO = POLICIES["auto"]


def times(factor, costs=STILL):
    """Costs of which every step takes so many times as long."""
    return dataclasses.replace(costs, seconds=tuple(factor * s for s in costs.seconds))


class Numbered(AUTO):
    """`auto`, whose plans say of how many sub-batches they are."""

    def __init__(self, count):
        super().__init__(allow=STAYING)
        object.__setattr__(self, "count", count)

    def plan(self, program, costs, budget):
        plan = super().plan(program, costs, budget)
        if isinstance(plan, Infeasible):
            lowest = dataclasses.replace(plan.plan, sub_batches=self.count)
            return dataclasses.replace(plan, plan=lowest)
        return dataclasses.replace(plan, sub_batches=self.count)


def of_numbers(compilers, factor=lambda count: 0.9 + 0.1 * count, **changes):
    """Variants in the numbers of sub-batches that have a compiler; more of them take longer."""
    return numbers(
        {
            n: variant(compiler, Numbered(n), times(factor(n)), f"in {n}")
            for n, compiler in compilers.items()
        },
        **changes,
    )


# -- numbers of sub-batches


@pytest.mark.parametrize(
    "excess, expected, compiled",
    [
        ({1: 0, 2: 0}, 1, {1}),  # as fast as predicted
        (
            {1: 8, 2: 0},
            2,
            {1, 2},
        ),  # one is predicted to take 32 s at first and then 45; two take 35
        ({1: 1000, 2: 0}, 2, {1, 2}),  # does not fit
        ({1: 1000, 2: 0, 4: 0, 8: 0, 16: 0, 32: 0}, 2, {1, 2}),
        ({1: 1000, 2: 1000, 4: 0, 8: 0}, 4, {1, 2, 4}),
    ],
)
def test_the_fastest_number_of_sub_batches_that_fits(excess, expected, compiled):
    """The next is compiled only where what is there by then is predicted to take longer."""
    compilers = {n: over(lambda plan, more=more: more) for n, more in excess.items()}
    found = find([of_numbers(compilers)], max_compiles=20)
    assert found.fits and found.best.variant.name == f"in {expected}"
    assert {n for n, each in compilers.items() if each.plans} == compiled


def test_as_many_sub_batches_as_it_takes_are_compiled():
    """Neither of the fastest five fits. Their misses must not use up the compiles of the last."""
    compilers = {2**n: over(lambda plan: 1000) for n in range(5)} | {32: Compiler()}
    found = find([of_numbers(compilers)])
    assert found.fits and found.best.variant.name == "in 32"


def test_the_fewest_sub_batches_that_fit():
    """Four would be faster by far, and are not looked at."""
    factors = {1: 1.0, 2: 1.0, 4: 0.1}
    for excess, expected in (({1: 0, 2: 0, 4: 0}, 1), ({1: 1000, 2: 0, 4: 0}, 2)):
        compilers = {n: over(lambda plan, more=more: more) for n, more in excess.items()}
        one = of_numbers(compilers, factors.__getitem__, splitting=Splitting.FEWEST)
        found = find([one])
        assert found.fits and found.best.variant.name == f"in {expected}"
        assert not compilers[4].plans


def halfway(fewer, more):
    return (fewer + more) // 2 if more - fewer > 1 else 0


@pytest.mark.parametrize("gain, expected", [(0.1, 5), (0.001, 8)], ids=["enough", "too little"])
def test_numbers_between_those_of_the_family_where_they_gain_enough(gain, expected):
    """The fewest of 3 to 8 that fit, if what two of them take leaves that to be gained."""
    compilers = {n: over(lambda plan, n=n: 1000 * (n < 5)) for n in range(1, 9)}
    every = of_numbers(compilers, lambda count: 1 + gain * count)
    some = dataclasses.replace(every, counts=(1, 2, 8), between=halfway)
    found = find([some], max_compiles=40)
    assert found.fits and found.best.variant.name == f"in {expected}"
    assert bool(compilers[4].plans) == bool(compilers[5].plans) == (expected == 5)
    fewest = dataclasses.replace(some, splitting=Splitting.FEWEST)
    assert find([fewest], max_compiles=40).best.variant.name == "in 8"


@pytest.mark.parametrize("splitting", [Splitting.FEWEST, Splitting.FASTEST])
def test_the_next_number_where_one_cannot_be_planned(splitting):
    class Short(POLICIES["auto"]):
        def plan(self, program, costs, budget):
            return Infeasible("short", budget, HIGH, "", plan=super().plan(program, costs, None))

    second = Compiler()
    both = {1: variant(None, Short(), STILL), 2: variant(second, auto(STAYING), STILL)}
    found = find([numbers(both, splitting=splitting)])
    assert found.fits and len(second.plans) == 1


@pytest.mark.parametrize("splitting", [Splitting.FEWEST, Splitting.FASTEST])
def test_the_next_number_where_one_cannot_be_compiled(splitting):
    def refuse(plan):
        raise CompileError(name="step", message="refused")

    second = Compiler()
    one, two = (variant(compiles, auto(STAYING), STILL) for compiles in (refuse, second))
    found = find([numbers({1: one, 2: two}, splitting=splitting)])
    assert found.fits and len(second.plans) == 1


# -- bounds


@dataclasses.dataclass(frozen=True)
class Bounded(AUTO):
    """`auto` with a made-up bound for what fits, which notes that it plans."""

    bound: float = 0.0
    asked: list = dataclasses.field(default_factory=list)

    def lower_bound_seconds(self, program, costs, budget):
        return self.bound if budget else 0.0

    def plan(self, program, costs, budget):
        self.asked.append(budget)
        return super().plan(program, costs, budget)


def bounded(bounds, compilers):
    policies = {n: Bounded(allow=STAYING, bound=bound) for n, bound in bounds.items()}
    variants = {
        n: variant(compilers[n], policy, STILL, f"in {n}") for n, policy in policies.items()
    }
    return numbers(variants), policies


def test_numbers_that_a_bound_rules_out_are_not_planned():
    """One sub-batch takes some 32 s; of two the bound says so much more, of four it does not."""
    bounds = {1: 0.0, 2: 1000.0, 4: 0.0}
    one, policies = bounded(bounds, {n: Compiler() for n in bounds})
    found = find([one])
    assert found.best.variant.name == "in 1"
    assert policies[1].asked and policies[4].asked and not policies[2].asked


def test_where_nothing_else_fits_what_a_bound_ruled_out_is_compiled_all_the_same():
    bounds = {1: 0.0, 2: 1000.0, 4: 0.0}
    compilers = {1: over(lambda p: 1000), 2: Compiler(), 4: over(lambda p: 1000)}
    found = find([bounded(bounds, compilers)[0]])
    assert found.fits and found.best.variant.name == "in 2"


def test_what_is_pruned_is_in_the_log():
    bounds, log = {1: 0.0, 2: 1000.0}, SearchLog()
    find([bounded(bounds, {n: Compiler() for n in bounds})[0]], log=log)
    (line,) = log.of(What.PRUNED)
    assert (line.variant, line.seconds) == ("in 2", 1000.0)


def test_a_bound_of_another_family_holds_for_this_one():
    """The other policy has a bound of its own that says nothing."""
    policy = Bounded(allow=STAYING)
    own = variant(None, auto(STAYING), STILL)
    bounding = variant(None, Bounded(allow=STAYING, bound=1000.0), STILL)
    other = variant(None, policy, STILL, "other")
    find([family(own), family(other, bounded_by=lambda count: bounding)])
    assert not policy.asked
    find([family(own), family(other)])
    assert policy.asked


# -- other policies


@pytest.mark.parametrize("gain, taken", [(0.02, False), (0.5, True)])
def test_another_policy_replaces_the_own_only_where_it_is_faster_by_the_tolerance(gain, taken):
    """Both are predicted to fit; the other one compiles first only if it gains enough."""
    own, other = Compiler(), Compiler()
    group = [
        family(variant(own, auto(STAYING), STILL)),
        family(variant(other, auto(STAYING), times(1 - gain), "other"), must_gain=0.05),
    ]
    found = find(group, time_tolerance=0.05)
    assert (found.best.variant.name == "other") == taken == bool(other.plans)
    assert bool(own.plans) != taken


def test_another_policy_is_taken_where_the_own_does_not_fit():
    group = [
        family(variant(over(lambda plan: 1000), auto(STAYING), STILL)),
        family(variant(None, auto(STAYING), times(2), "other"), must_gain=0.05),
    ]
    found = find(group)
    assert found.fits and found.best.variant.name == "other"


@pytest.mark.parametrize("tolerance, compiles", [(0.05, 1), (0.0, 2)])
def test_what_is_faster_by_less_than_predictions_are_off_is_not_compiled(tolerance, compiles):
    """The fastest misses once, and what is next takes 2 % longer than its second plan."""
    first, second = over(lambda plan: 3), Compiler()
    group = [
        family(variant(first, auto(STAYING), STILL)),
        family(variant(second, auto(STAYING), times(1.0), "second")),
    ]
    found = find(group, time_tolerance=tolerance)
    assert found.fits and len(first.plans) + len(second.plans) >= compiles


# -- what XLA's heap takes


def lossy(heap):
    """A policy of whose plans the heap takes 1000 B more."""

    class Lossy(AUTO):
        name = "lossy"

    heap(lambda program, plan: plan.predicted_peak + 1000 * (plan.policy == "lossy"))
    return Lossy(allow=STAYING)


@pytest.mark.parametrize("long_steps", [1, 1000])
def test_numbers_are_ranked_by_what_fits_with_the_heap(heap, long_steps):
    """Two are predicted to be faster, but whatever is planned for them the heap takes too much."""
    policy = lossy(heap)
    first, second = Compiler(lambda plan: plan.predicted_peak), Compiler()
    both = {
        1: variant(first, auto(STAYING), STILL, "in 1"),
        2: variant(second, policy, times(0.5), "in 2"),
    }
    found = find([numbers(both)], long_steps=long_steps)
    assert found.fits and found.best.variant.name == "in 1"
    assert len(first.plans) == 1 and not second.plans


def test_where_no_number_fits_the_one_that_needs_the_least_with_the_heap_is_compiled_first(heap):
    """Of one sub-batch nearly the budget is live at the least, and the heap takes much more; what is
    planned for two is predicted to need a little more than the budget, and less is taken of it."""
    low = auto(STAYING).plan(PROGRAM, STILL, BUDGET)

    class Short(AUTO):
        name = "short"

        def plan(self, program, costs, budget):
            lowest = dataclasses.replace(low, policy="short")
            return Infeasible(self.name, budget, BUDGET + 1, "here", plan=lowest)

    heap(lambda program, plan: BUDGET + (1000 if plan.policy == "short" else 3))
    compilers = {n: Compiler(lambda plan: plan.predicted_peak) for n in (1, 2)}
    both = {
        1: variant(compilers[1], Short(), STILL, "in 1"),
        2: variant(compilers[2], auto(STAYING), STILL, "in 2"),
    }
    found = find([numbers(both)])
    assert found.fits and found.best.variant.name == "in 2" and not compilers[1].plans


# -- where nothing moves


def test_what_cannot_move_has_no_second_form_without_transfers():
    """Its first plan moves nothing, so there is no other form to plan."""
    compile_plan = over(lambda plan: 1000)
    log = SearchLog()
    find(variant(compile_plan, auto(STAYING), STILL), log=log)
    assert {line.variant for line in log.lines} == {"auto"}
    log = SearchLog()
    find(variant(over(lambda plan: 1000), costs=FAST), log=log)
    assert {line.variant for line in log.lines} == {"auto", "auto, without transfers"}


def test_what_moves_hosted_buffers_alone_has_no_second_form_without_transfers():
    """It would be planned again and again: it moves the same."""
    hosted = dataclasses.replace(PROGRAM, hosted=PROGRAM.inputs[:1])
    policy = Streaming(auto(STAYING), FAST.link)
    compile_plan = over(lambda plan: 1 if plan.predicted_peak > HIGH - 2 else 0)
    one = dataclasses.replace(variant(compile_plan, policy), program=hosted)
    log = SearchLog()
    found = find(one, log=log, budget=HIGH)
    assert found.fits and len(compile_plan.plans) == 2 and found.best.plan.transfers
    assert {line.variant for line in log.lines} == {"auto"}


def test_variants_are_made_only_as_they_are_looked_at():
    """Numbers that cannot be faster than what fits are never made."""
    made = []

    def make(count):
        made.append(count)
        return variant(None, auto(STAYING), times(count**2), f"in {count}")

    found = find([Family((1, 2, 4, 8), make)], budget=HIGH)
    assert found.fits and found.best.variant.name == "in 1" and made == [1]
    made.clear()
    found = find([Family((1, 2, 4, 8), make)])  # of two nothing runs again, and still it is slower
    assert found.fits and found.best.variant.name == "in 1" and made == [1, 2]


def test_nothing_is_planned_for_less_than_is_resident():
    found = find(variant(), budget=LOW - 1)
    assert not found.fits
