"""moDNN's equations 1 to 3: what a task needs, the lower bound, and the size of sub-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import CONV, Spec, network, with_algorithms

from vmem_jax.core.planned import with_convolutions
from vmem_jax.policy.convolving import fastest, smallest_workspaces
from vmem_jax.policy.modnn import minimum_peak
from vmem_jax.policy.sub_batch import Needed, Task, lower_bound, needed, sub_batch_size

NET = network([Spec("other", 8), *[CONV] * 4, Spec("act", 8)])


@pytest.mark.parametrize("choose", [fastest, smallest_workspaces])
def test_equation_1_the_largest_task_with_its_workspace(choose):
    program, costs = with_algorithms(NET.program, NET.costs({}))
    convolutions = choose(costs.convolutions)
    found = needed(program, convolutions)
    assert found.weights == program.resident_nbytes
    of_whole = with_convolutions(program, convolutions.items())
    assert found.weights + found.task == minimum_peak(
        of_whole, NET.costs({}), range(len(program.steps))
    )


def test_equation_2():
    tasks = [Task(256 * 10), Task(256 * 40), Task(256 * 7)]
    assert lower_bound(tasks, 256, 1000) == 1040
    assert lower_bound([], 256, 1000) == 1000


@pytest.mark.parametrize(
    "fixed, of_a_sample, budget, samples",
    [
        (0, 10, 1000 + 256 * 10, 256),  # the whole batch
        (0, 10, 1000 + 128 * 10, 128),
        (0, 10, 1000 + 128 * 10 - 1, 127),
        (100, 10, 1000 + 100 + 64 * 10, 64),  # several rounds
        (700, 1, 1000 + 700 + 30, 30),
        (700, 1, 1000 + 700, 0),
    ],
)
def test_equation_3_converges(fixed, of_a_sample, budget, samples):
    need = lambda b: Needed(1000, fixed + of_a_sample * b)
    assert sub_batch_size(need, 256, budget) == samples


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 50)), min_size=1, max_size=6),
    st.integers(1, 600),
    st.integers(0, 20_000),
)
def test_it_is_the_largest_size_that_fits_in_few_rounds(tasks, batch, free):
    """Against every size in turn."""
    most = lambda b: max(fixed + of_a_sample * b for fixed, of_a_sample in tasks)
    asked = []

    def need(b):
        asked.append(b)
        return Needed(7, most(b))

    fitting = [b for b in range(1, batch + 1) if most(b) <= free]
    assert sub_batch_size(need, batch, 7 + free) == max(fitting, default=0)
    assert len(asked) == len({*asked}) <= 6 + batch.bit_length()
