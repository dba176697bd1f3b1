"""The sweep: searches go where the trade is steep, and share what they compile."""

from __future__ import annotations

import pytest
from search_cases import HIGH, LOW, Compiler, auto, family, variant

from vmem_jax.api.sweep import front, sweep
from vmem_jax.core.plan import Plan
from vmem_jax.search.attempt import Attempt, Found, Record
from vmem_jax.search.search import Compiles, Search


def attempt(need: int, seconds: float) -> Attempt:
    plan = Plan("", "auto", (), True, None, need, seconds)
    return Attempt(variant(), plan, None, need, need, variant().costs)


class Trade:
    """A search that finds the fastest of some plans that fits, and notes its budgets."""

    def __init__(self, *points: tuple[int, float]) -> None:
        self.attempts = [attempt(*point) for point in points]
        self.budgets: list[int] = []

    def __call__(self, budget: int) -> Found:
        self.budgets.append(budget)
        fitting = [a for a in self.attempts if a.need <= budget]
        if not fitting:
            best = min(self.attempts, key=lambda a: a.need)
            return Found(best, False, (best,))
        best = min(fitting, key=lambda a: a.plan.predicted_seconds)
        return Found(best, True, (best,))


def shown(attempts):
    return [(a.need, a.plan.predicted_seconds) for a in attempts]


STEEP = [(100, 9.0), (150, 5.0), (200, 4.0), (400, 3.9), (800, 3.0)]


def test_all_points_are_found_where_there_are_searches_enough():
    assert shown(sweep(Trade(*STEEP), 10_000, 30)) == STEEP


def test_few_searches_go_to_the_largest_boxes():
    trade = Trade(*STEEP)
    found = shown(sweep(trade, 10_000, 4))
    assert len(trade.budgets) == 4
    assert found[0] == STEEP[0] and found[-1] == STEEP[-1] and len(found) > 2
    assert trade.budgets[2] == 450  # the middle of both ends


def test_two_searches_show_both_ends():
    assert shown(sweep(Trade(*STEEP), 10_000, 2)) == [STEEP[0], STEEP[-1]]


def test_what_differs_by_little_is_not_searched():
    trade = Trade((1000, 2.0), (1005, 1.0))
    sweep(trade, 10_000, 30)
    assert len(trade.budgets) == 2


def test_no_point_is_slower_and_larger_than_another():
    found = front([attempt(5, 2.0), attempt(3, 4.0), attempt(5, 3.0), attempt(8, 2.0)])
    assert shown(found) == [(3, 4.0), (5, 2.0)]


@pytest.mark.parametrize("compiles", [Compiles.NONE, Compiles.UNTRIED])
def test_searches_share_what_is_compiled(compiles):
    compiler = Compiler()
    group = [family(variant(compiler, auto(("order", "recompute"))))]
    record = Record()
    find = lambda budget: Search(budget, record=record, compiles=compiles).run([group])
    points = sweep(find, 2**62, 6)
    needs = [a.need for a in points]
    assert needs == sorted(set(needs)) and LOW < needs[0] < needs[-1] <= HIGH
    assert len(compiler.plans) == len({p.order for p in compiler.plans})
    assert bool(compiler.plans) is (compiles is not Compiles.NONE)
    assert all(point.compiled is None for point in points)
