"""Reductions of odd rows take what was measured on an H200."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from vmem_jax.capture import capture
from vmem_jax.core.cards import machine_for

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def maxima(x):
    return x.max(-1)


def two_sums(x):
    wide = x.astype(jnp.float32)
    return wide.sum(-1), jnp.square(wide).sum(-1)


def measured():
    """Of each reduction and length of rows, seconds."""
    for line in (RESULTS / "rates_h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "row":
            yield row["name"], row["shape"][1], 1e-6 * row["us"]


MEASURED = {(name, length): seconds for name, length, seconds in measured()}


def predicted(function, length):
    x = jax.ShapeDtypeStruct((2**26 // length, length), "bfloat16")
    program = capture(jax.jit(function).trace(x).jaxpr, platform="gpu").program
    return sum(map(machine_for("NVIDIA H200").seconds, program.steps))


@pytest.mark.parametrize("length", [49, 197])
@pytest.mark.parametrize("function", [maxima, two_sums])
def test_odd_rows_take_what_was_measured(function, length):
    seconds = MEASURED[function.__name__.replace("_", " "), length]
    assert predicted(function, length) == pytest.approx(seconds, rel=0.35)


def test_even_rows_take_the_time_of_their_bytes():
    assert predicted(maxima, 64) == pytest.approx(MEASURED["maxima", 64], rel=0.15)
    assert predicted(maxima, 49) > 2 * predicted(maxima, 64)


def test_sums_of_columns_are_no_rows():
    x = jax.ShapeDtypeStruct((2**16, 49), "bfloat16")
    [rows], [columns] = (
        capture(
            jax.jit(lambda x, axis=axis: x.max(axis)).trace(x).jaxpr, platform="gpu"
        ).program.steps
        for axis in (1, 0)
    )
    assert rows.flops == 2_250 * 2**16 + 30 * 2**16 * 50
    assert columns.flops < rows.flops - 2_000 * 2**15


def test_each_device_reduces_its_own_rows():
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    split = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((2**16, 49), "bfloat16")
    trace = jax.jit(maxima).trace(x)
    whole, parts = (
        capture(trace.jaxpr, platform="gpu", shardings=[sharding]).program.steps[0].flops
        for sharding in (None, split)
    )
    assert parts == whole / 4
