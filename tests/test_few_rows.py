"""Sums over few rows are fused into what reads them, as XLA:GPU does."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from vmem_jax.capture import capture
from vmem_jax.devices.targets import target


def added(axis):
    """A sum that an addition of as many elements reads."""
    return lambda x: 1 / x.sum(axis) + 3


def broadcast(x, y):
    return y - jnp.sin(x).sum(0)


CASES = [
    (added(0), [(31, 64)], 1),
    (added(0), [(32, 64)], 2),
    (added(1), [(4, 31, 64)], 1),
    (added(0), [(40, 8)], 1),
    (added(0), [(40, 32)], 2),
    (added(1), [(64, 32)], 2),
    (broadcast, [(16, 64), (1024, 64)], 2),
]
"""A function, the shapes of its arguments, and its kernels."""


def kernels_of(function, shapes, platform="gpu"):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return len(capture(jax.jit(function).trace(*args).jaxpr, platform=platform).program.steps)


@pytest.mark.parametrize(("function", "shapes", "kernels"), CASES)
def test_few_rows_are_summed_in_the_kernel_that_reads_them(function, shapes, kernels):
    assert kernels_of(function, shapes) == kernels


def test_the_cpu_sums_in_a_kernel_of_its_own():
    assert kernels_of(added(0), [(31, 64)], "cpu") == 2


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("function", "shapes", "kernels"), CASES)
def test_xla_makes_as_many_kernels(function, shapes, kernels):
    there = target("h200").sharding()
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=there) for shape in shapes]
    text = jax.jit(function).lower(*args).compile().as_text()
    [entry] = re.findall(r"^ENTRY .*?^}", text, re.MULTILINE | re.DOTALL)
    assert len(re.findall(r" fusion\(", entry)) == kernels
