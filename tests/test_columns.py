"""What sums over rows take, beside kernels of a U-Net's step on an H200 (JAX 0.11.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from vmem_jax.capture import capture
from vmem_jax.capture.columns import Sum
from vmem_jax.core.cards import CARDS


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    """Sums are left to XLA, as they were in that step."""
    monkeypatch.setattr(Sum, "parts", lambda self: 1)


def of(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def group_sums(x, y=None):
    """Of 32 groups of channels, as in a group norm or its gradient."""
    x = x.astype("float32")
    other = jnp.square(x) if y is None else x * y.astype("float32")
    grouped = lambda a: a.reshape(*a.shape[:3], 32, -1).sum((1, 2, 4))
    return grouped(x), grouped(other)


def micros(call, *shapes):
    found = capture(jax.jit(call).trace(*shapes).jaxpr, platform="gpu").program
    return 1e6 * sum(map(CARDS["h200"].machine.seconds, found.steps))


TRACED = {
    "40 blocks": (17.3, lambda x: x.astype("float32").sum(0), of(4096, 1280)),
    "320 blocks": (11.7, group_sums, of(16, 32, 32, 640)),
    "320 blocks of two arrays": (22.4, group_sums, *2 * [of(16, 32, 32, 640)]),
    "four times the rows": (79.2, group_sums, *2 * [of(16, 64, 64, 640)]),
}
"""Microseconds, step, shapes."""


@pytest.mark.parametrize("name", TRACED)
def test_sums_take_what_the_card_took(name):
    taken, call, *shapes = TRACED[name]
    assert micros(call, *shapes) == pytest.approx(taken, rel=0.3)


def test_few_columns_take_as_long_as_many():
    """Blocks that run at once take as long, however many they are."""
    total = lambda x: x.astype("float32").sum(0)
    few, many = (micros(total, of(4096, columns)) for columns in (320, 2560))
    assert few == pytest.approx(many, rel=0.02)
    longer = micros(total, of(8192, 2560))  # made in parts, which are blocks enough
    assert longer < 1.2 * many


def test_sums_along_rows_are_no_sums_over_rows():
    total = lambda x: x.astype("float32").sum(-1)
    assert micros(total, of(4096, 1280)) < 10


def test_sums_of_nothing_take_no_rows():
    assert micros(lambda x: x.sum(0), of(3, 0, 4)) >= 0
    assert micros(lambda x: x.sum(1), of(0, 3, 4)) >= 0
