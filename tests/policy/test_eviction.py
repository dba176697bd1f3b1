"""What the executor drops at its limit: the lowest score of all, found by looking at few of them."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import chain, programs, unit_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.policy import executor
from vmem_jax.policy.eviction import Evictions
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.order import canonical_order


class OneByOne(Evictions):
    """Looks at every live value each time."""

    def lowest(self, now, pinned):
        best, least = None, float("inf")
        for b in self._live:
            if b not in pinned:
                entry = self._add(b, now)
                if entry is not None and entry[0] < least:
                    best, least = b, entry[0]
        return best


def order_under(limit, program, costs, victims):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "Evictions", victims)
        return Execution(program, costs, canonical_order(program), limit=limit).order


@settings(max_examples=40, deadline=None)
@given(st.data(), programs(layers=12, pure=True))
def test_the_same_as_one_by_one(data, program):
    seconds = data.draw(
        st.lists(
            st.integers(1, 9),
            min_size=len(program.steps),
            max_size=len(program.steps),
        )
    )
    costs = dataclasses.replace(unit_costs(program), seconds=tuple(map(float, seconds)))
    most = sum(buffer.nbytes for buffer in program.buffers)
    limit = program.resident_nbytes + data.draw(st.integers(0, most))
    assert order_under(limit, program, costs, Evictions) == order_under(
        limit, program, costs, OneByOne
    )


@pytest.mark.parametrize("room", [30, 100, 600])
def test_the_same_on_a_chain(room):
    program = chain(300, parameters=1)
    costs = unit_costs(program)
    limit = program.resident_nbytes + room
    assert order_under(limit, program, costs, Evictions) == order_under(
        limit, program, costs, OneByOne
    )


@pytest.mark.parametrize("n", [500, 2000])
def test_a_step_has_few_scores_reckoned(n):
    made = []

    class Counted(Evictions):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    program = chain(n)
    order = order_under(n // 2, program, unit_costs(program), Counted)
    assert len(order) > 2 * n  # something was dropped
    assert made[0].computed < 6 * len(order)
