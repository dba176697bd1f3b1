"""moDNN's equations 1 to 3: what a task needs, the lower bound, and the size of sub-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmem_jax.policy import Infeasible
from vmem_jax.policy.sub_batch import Task, lower_bound, needed_nbytes, sub_batch_size

CONSTANT = lambda samples: 100
PROPORTIONAL = lambda samples: 3 * samples


def test_equation_1():
    assert needed_nbytes(Task(256 * 10), 32, 256) == 320
    assert needed_nbytes(Task(256 * 10, PROPORTIONAL), 32, 256) == 320 + 96
    assert needed_nbytes(Task(256 * 10, CONSTANT), 1, 256) == 110


def test_equation_2():
    tasks = [Task(256 * 10, CONSTANT), Task(256 * 40), Task(256 * 7)]
    assert lower_bound(tasks, 256, 1000) == 1040
    assert lower_bound([], 256, 1000) == 1000


@pytest.mark.parametrize(
    "workspace, budget, samples",
    [
        (lambda samples: 0, 1000 + 256 * 10, 256),  # the whole batch
        (lambda samples: 0, 1000 + 128 * 10, 128),
        (lambda samples: 0, 1000 + 128 * 10 - 1, 127),
        (PROPORTIONAL, 1000 + 13 * 64, 64),
        (CONSTANT, 1000 + 100 + 10 * 64, 64),  # b (10 + 100 / b) = 740: several rounds
        (CONSTANT, 1000 + 50, 1),  # no room for the workspace: the algorithm without any
    ],
)
def test_equation_3_converges(workspace, budget, samples):
    assert sub_batch_size([Task(256 * 10, workspace), Task(256)], 256, 1000, budget) == samples


def test_a_budget_below_the_lower_bound():
    outcome = sub_batch_size([Task(256 * 10)], 256, 1000, 1009)
    assert isinstance(outcome, Infeasible)
    assert (outcome.budget, outcome.minimum_peak) == (1009, 1010)
    assert outcome.at == "one sample at a time"
    assert sub_batch_size([Task(256 * 10)], 256, 1000, 1010) == 1


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 50), st.integers(0, 3)), min_size=1),
    st.integers(1, 64),
    st.integers(1, 20_000),
)
def test_it_fits_and_more_would_not_by_much(raw, batch, free):
    tasks = [Task(n, lambda b, c=c, p=p: c + p * b) for n, c, p in raw]
    samples = sub_batch_size(tasks, batch, 7, 7 + free)
    if isinstance(samples, Infeasible):
        assert samples.minimum_peak > 7 + free
        return
    most = lambda b: max(needed_nbytes(t, b, batch) for t in tasks)
    assert 1 <= samples <= batch
    assert most(samples) <= free or samples == 1
    if samples == batch or samples == 1:
        return
    assert most(2 * samples + 1) > free  # the iteration ends near its fixed point
