"""Products that share an operand, which XLA:GPU computes as one."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.shared_operands import products_as_one
from vmem_jax.core.cards import CARDS
from vmem_jax.devices.targets import target

MACHINE = CARDS["h200"].machine
OURS = compat.FENCE_OPTIONS["gpu"]
N = 128


def gradient(cotangent, x):
    """That of a weight, as JAX writes it: a transposed product."""
    return lax.dot_general(cotangent, x, (((0,), (0,)), ((), ()))).T


def gates(x, y, a, b):
    return jnp.tanh(x @ a), x @ b, jnp.sin(x @ a.T)


def of_one_weight(x, y, a, b):
    return x @ a, jnp.sin(y) @ a


def of_one_cotangent(x, y, a, b):
    d = jnp.sin(x)
    return d @ a.T, d @ b.T, gradient(d, x), gradient(d, y)


def of_two_cotangents(x, y, a, b):
    """The gradients of each cotangent are one, not those to one input."""
    d, e = jnp.sin(x), jnp.cos(y)
    return gradient(d, x), gradient(d, y), gradient(e, x), gradient(e, y)


def dependent(x, y, a, b):
    return jnp.sin(x @ a) @ a


def through_a_barrier(x, y, a, b):
    z, c = lax.optimization_barrier((x, a))
    return z @ c, x @ b


def of_other_types(x, y, a, b):
    return x @ a, lax.dot_general(
        x, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16
    )


ITERATIONS = [
    (gates, [3]),
    (of_one_weight, [2]),
    (of_one_cotangent, [2, 2]),
    (of_two_cotangents, [2, 2]),
    (dependent, []),
    (through_a_barrier, []),
    (of_other_types, []),
]
"""What an iteration computes, and of how many products each one is that is of several."""


def arguments(sharding=None, n=N):
    return [jax.ShapeDtypeStruct((n, n), jnp.float32, sharding=sharding)] * 4


@pytest.mark.parametrize(("iteration", "expected"), ITERATIONS)
def test_which_products_are_one(iteration, expected):
    eqns = compat.open_jaxpr(jax.jit(iteration).trace(*arguments()).jaxpr).eqns
    groups = products_as_one(eqns)
    assert sorted(map(len, groups)) == expected
    found = [i for group in groups for i in group]
    assert len(found) == len({*found})
    assert all(eqns[i].primitive.name == "dot_general" for i in found)


def test_gradients_of_one_cotangent_are_one():
    eqns = compat.open_jaxpr(jax.jit(of_two_cotangents).trace(*arguments()).jaxpr).eqns
    cotangents = [{eqns[i].invars[0] for i in group} for group in products_as_one(eqns)]
    assert [len(each) for each in cotangents] == [1, 1]


def three(x, a, b, c):
    return x @ a, x @ b, x @ c


SIZES = [
    ((1024, 1024, 512), [3]),
    ((2048, 1024, 512), [2]),
    ((1024, 4096, 256), [2]),
    ((4096, 1024, 512), []),
    ((4096, 64, 64), [3]),
]
"""Rows, summed values and columns of three products of one value, and how many are one: two that
take 4 MiB each besides may be joined by a third, two of 5 may not."""


def of_sizes(rows, summed, columns, sharding=None):
    shapes = [(rows, summed), *[(summed, columns)] * 3]
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]


@pytest.mark.parametrize(("sizes", "expected"), SIZES)
def test_large_products_stay_apart(sizes, expected):
    eqns = compat.open_jaxpr(jax.jit(three).trace(*of_sizes(*sizes)).jaxpr).eqns
    assert [len(group) for group in products_as_one(eqns)] == expected


def test_no_product_is_one_with_another_behind_the_boundary_of_two_loops():
    eqns = compat.open_jaxpr(jax.jit(gates).trace(*arguments()).jaxpr).eqns
    [first, second, third] = [i for i, e in enumerate(eqns) if e.primitive.name == "dot_general"]
    assert products_as_one(eqns, boundary=third) == ((first, second),)


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("iteration", "expected"), ITERATIONS)
def test_xla_computes_them_as_one(iteration, expected):
    there = arguments(target("h200").sharding())
    compiled = jax.jit(iteration).lower(*there).compile(OURS).as_text()
    products = len(re.findall(r"\bdot\(|__cublas", compiled))
    jaxpr = compat.open_jaxpr(jax.jit(iteration).trace(*arguments()).jaxpr)
    asked = sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)
    assert products == asked - sum(expected) + len(expected)


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("sizes", "expected"), SIZES)
def test_xla_leaves_large_products_apart(sizes, expected):
    there = of_sizes(*sizes, target("h200").sharding())
    compiled = jax.jit(three).lower(*there).compile(OURS)
    products = len(re.findall(r"\bdot\(|__cublas", compiled.as_text()))
    assert products == 3 - sum(expected) + len(expected)


def totals(carry, xs):
    """Gradients that are added to what is carried."""
    x, y, d = xs
    d = jnp.sin(d)
    return (carry[0] + gradient(d, x), carry[1] + gradient(d, y)), None


def loop_of(platform):
    square, stack = jnp.zeros((N, N)), jnp.zeros((4, N, N))
    step = lambda carry, xs: lax.scan(totals, carry, xs)
    closed = jax.jit(step).trace((square,) * 2, (stack,) * 3).jaxpr
    steps = capture(closed, platform=platform).program.steps
    return next(step for step in steps if step.op == "scan")


def test_a_part_of_a_product_is_added_to_a_total_by_a_kernel_of_its_own():
    body = loop_of("gpu").body
    products = [step for step in body if step.op == "dot_general"]
    assert [step.launched for step in products] == [True, False]
    assert [step.in_place for step in products] == [(), ()]
    adds = [step for step in body if step.op == "add" and step.nbytes == 3 * N * N * 4]
    assert len(adds) == 2 and all(step.launched and step.in_place for step in adds)


def test_a_part_of_a_product_takes_less_than_one_by_itself():
    _, part = (step for step in loop_of("gpu").body if step.op == "dot_general")
    alone = dataclasses.replace(part, launched=True)
    least = MACHINE.launch + MACHINE.product + MACHINE.latency / 3
    assert MACHINE.seconds(alone) == pytest.approx(least + alone.nbytes / MACHINE.bandwidth)
    assert part.nbytes / MACHINE.bandwidth < MACHINE.seconds(part) < MACHINE.product
