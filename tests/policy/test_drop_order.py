"""The order of a program with drops alone: that of the executor."""

from __future__ import annotations

import pytest
from helpers import chain, fan, join, programs, u_shape, unit_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.policy.drop_order import order_with_drops
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.order import canonical_order
from vmem_jax.policy.recomputation import Recomputation


def of_the_executor(recomputation, drops):
    program, base = recomputation.program, recomputation.base
    return tuple(
        Execution(program, unit_costs(program), base, drops, recomputation=recomputation).order
    )


def every_interval(recomputation):
    """Pairs (buffer, use), those that may not be dropped and last uses as well."""
    return [(b, n) for b, uses in enumerate(recomputation.uses) for n in range(len(uses))]


@settings(max_examples=300, deadline=None)
@given(st.data(), programs(layers=10))
def test_it_is_the_order_of_the_executor(data, program):
    orders = (tuple(range(len(program.steps))), canonical_order(program))
    recomputation = Recomputation(program, data.draw(st.sampled_from(orders)))
    drops = data.draw(st.sets(st.sampled_from(every_interval(recomputation))))
    assert order_with_drops(recomputation, drops) == of_the_executor(recomputation, drops)


@pytest.mark.parametrize("program", [chain(40, parameters=1), fan(8), join(6), u_shape(5)])
def test_with_everything_dropped(program):
    recomputation = Recomputation(program, canonical_order(program))
    order = order_with_drops(recomputation, every_interval(recomputation))
    assert len(order) > len(program.steps)
    assert order == of_the_executor(recomputation, every_interval(recomputation))


def test_without_drops_it_is_the_base():
    recomputation = Recomputation(program := chain(5), canonical_order(program))
    assert order_with_drops(recomputation, ()) == recomputation.base
