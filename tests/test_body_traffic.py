"""Copies in an iteration of a loop, and the kernels that they take on a GPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.devices.targets import target

MACHINE = CARDS["h200"].machine
ITERATIONS, N = 4, 128


def read_by_fused_kernels(c, s):
    """One kernel makes what is carried, and one what is stacked."""
    a = jnp.sin(c + s)
    return lax.sort(jnp.cos(a) + 1), a


def read_by_a_library(c, s):
    a = jnp.sin(c + s)
    return lax.sort(a), a


def carried_too(c, s):
    a = jnp.sin(c + s)
    return a, a


def carried_in(c, s):
    return jnp.sin(c + s), c


def slice_of_a_library(c, s):
    return lax.sort(jnp.sin(c @ s)), None


def slice_of_a_barrier(c, s):
    c, s = lax.optimization_barrier((c, s))
    return jnp.sin(c + s), None


CASES = [
    (read_by_fused_kernels, 0, 1),
    (read_by_a_library, 1, 1),
    (carried_too, 1, 1),
    (carried_in, 1, 1),
    (slice_of_a_library, 1, 1),
    (slice_of_a_barrier, 1, 1),
]
"""Iterations, the copies of each that are kernels, and the kernels that read slices of stacks."""


def loop_of(iteration, platform="gpu"):
    square, stack = jnp.zeros((N, N)), jnp.zeros((ITERATIONS, N, N))
    closed = jax.jit(lambda c, s: lax.scan(iteration, c, s)).trace(square, stack).jaxpr
    steps = capture(closed, platform=platform).program.steps
    return next(step for step in steps if step.op == "scan")


@pytest.mark.parametrize(("iteration", "copies", "fetches"), CASES)
def test_kernels_of_an_iteration(iteration, copies, fetches):
    loop = loop_of(iteration)
    assert (loop.copies, loop.fetches) == (copies, fetches)
    least = (1 + copies) * MACHINE.launch + fetches * MACHINE.latency
    least += sum(MACHINE.seconds(step) for step in loop.body)
    expected = ITERATIONS * least + loop.nbytes / MACHINE.bandwidth
    assert MACHINE.seconds(loop) == pytest.approx(expected)


def test_kernels_are_counted_on_a_gpu_alone():
    assert [(loop.copies, loop.fetches) for loop in [loop_of(carried_too, "cpu")]] == [(0, 0)]


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("iteration", "copies", "fetches"), CASES)
def test_xla_copies_so_often(iteration, copies, fetches):
    """A copy is a fusion of nothing but the slice, or its update, or a copy to the stack."""
    del fetches
    shapes = (N, N), (ITERATIONS, N, N)
    there = target("h200").sharding()
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=there) for shape in shapes]
    text = jax.jit(lambda c, s: lax.scan(iteration, c, s)).lower(*args).compile().as_text()
    started = re.findall(r" fusion-start\(.*calls=%fused_dynamic_(?:update_)?slice", text)
    plain = re.findall(r" fusion\(.*calls=%(?:wrapped|fused)_dynamic_(?:update_)?slice", text)
    assert copies <= len(started) + len(plain) <= copies + (iteration is read_by_fused_kernels)
