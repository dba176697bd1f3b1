"""What an iteration takes whose slices come from host memory and return."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import Builder

from vmem_jax.core.hosted_slices import iteration_seconds

RATE = 10.0
"""Bytes a second over the link, each way."""

# Buffer 0 is given; the first of the steps writes 1, the second 2, and so on.


def fetch(of, nbytes):
    return {"reads": (of,), "nbytes": nbytes, "fetched": nbytes}


def give_back(of, nbytes):
    return {"reads": (of,), "nbytes": nbytes, "returned": nbytes}


def compute(*of, seconds):
    return {"reads": of, "nbytes": 1, "flops": seconds}


@pytest.mark.parametrize(
    "steps, seconds",
    [
        ([compute(0, seconds=3), compute(1, seconds=2)], 5),
        ([fetch(0, 20), compute(0, seconds=3)], 3),  # it comes meanwhile
        ([fetch(0, 20), compute(1, seconds=3)], 5),
        ([fetch(0, 20), compute(0, seconds=3), compute(1, 2, seconds=1)], 4),
        ([compute(0, seconds=3), fetch(0, 20), compute(2, seconds=1)], 4),  # it comes first
        ([fetch(0, 20), fetch(0, 30), compute(2, seconds=1), compute(1, seconds=1)], 7),
        ([compute(0, seconds=3), give_back(1, 20)], 5),
        ([compute(0, seconds=3), give_back(1, 20), compute(1, seconds=4)], 7),
        ([compute(0, seconds=3), give_back(1, 20), give_back(1, 10)], 6),
        # a barrier: behind it is computed what has left before it
        ([compute(0, seconds=3), give_back(1, 20), compute(1, 2, seconds=0)], 5),
        (
            [
                compute(0, seconds=3),
                give_back(1, 20),
                compute(1, 2, seconds=0),
                compute(1, seconds=1),
            ],
            5,
        ),
        (
            [
                compute(0, seconds=3),
                give_back(1, 20),
                compute(1, 2, seconds=0),
                compute(3, seconds=1),
            ],
            6,
        ),
    ],
)
def test_slices_come_from_the_beginning_and_the_last_leave_before_the_end(steps, seconds):
    builder = Builder()
    builder.input(1)
    for step in steps:
        link = {name: step.pop(name, 0) for name in ("fetched", "returned")}
        builder.step(step.pop("reads"), step.pop("nbytes"), **step)
        builder.steps[-1] = dataclasses.replace(builder.steps[-1], **link)
    found = iteration_seconds(builder.steps, lambda step: float(step.flops), RATE, RATE)
    assert found == pytest.approx(seconds)
