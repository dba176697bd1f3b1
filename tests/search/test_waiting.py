"""search: variants of which no plan can fit are not made, unless nothing fits and they may be the
lowest."""

from __future__ import annotations

import dataclasses

import pytest
from search_cases import (
    BUDGET,
    HIGH,
    LOW,
    STILL,
    Compiler,
    Splitting,
    auto,
    find,
    lowest_plan,
    over,
    variant,
)

from vmem_jax.search.attempt import Record, Tried
from vmem_jax.search.variant import Family

LOWEST = lowest_plan(auto()).predicted_peak


class Numbers:
    """A family of 1, 2 and 4 sub-batches, which notes what is made; of 2 and 4 every plan needs
    `least` bytes."""

    def __init__(self, least, splitting=Splitting.FASTEST, **variants):
        self.made = []
        self.variant = lambda: variant(costs=STILL, **variants)
        need = lambda count: 0 if count == 1 else least
        self.family = Family((1, 2, 4), self.make, splitting, least=need)

    def make(self, count):
        self.made.append(count)
        return self.variant()


@pytest.mark.parametrize("least, made", [(BUDGET, [1, 2, 4]), (BUDGET + 1, [1])])
def test_what_cannot_fit_is_not_made(least, made):
    numbers = Numbers(least, compile_plan=over(lambda plan: BUDGET))
    find([numbers.family], max_compiles=1)  # and nothing fits: each may be of use
    assert sorted({*numbers.made}) == made


@pytest.mark.parametrize("least, made", [(LOWEST, [1, 2, 4]), (2 * HIGH, [1])])
def test_where_nothing_fits_the_lowest_are_made_after_all(least, made):
    numbers = Numbers(least)
    found = find([numbers.family], budget=LOW)
    assert not found.fits and sorted({*numbers.made}) == made


@pytest.mark.parametrize("least, made", [(LOWEST, [1, 2, 4]), (2 * HIGH, [1])])
def test_the_fewest_wait_one_after_another(least, made):
    numbers = Numbers(least, Splitting.FEWEST)
    assert not find([numbers.family], budget=LOW).fits
    assert sorted({*numbers.made}) == made


def test_what_compiled_to_less_before_is_made():
    plan = dataclasses.replace(lowest_plan(auto()), sub_batches=2)
    numbers = Numbers(2 * HIGH, compile_plan=Compiler(lambda plan: 2 * HIGH))
    find([numbers.family], record=Record([Tried(plan, BUDGET)]))
    assert 2 in numbers.made
