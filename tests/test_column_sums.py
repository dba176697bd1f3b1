"""Sums over few rows, which a rewritten step makes in parts on one GPU."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture.columns import Sum
from vmem_jax.devices.targets import target
from vmem_jax.rewrite.column_sums import with_sums_in_parts

BLOCKS = 264  # that run at once


@pytest.mark.parametrize(
    "lengths, columns, parts",
    [
        ((16, 197), 1024, 8),  # 256 blocks; 197 has no divisors
        ((4096,), 1280, 32),
        ((4, 1024), 1024, 8),
        ((2, 2048), 4096, 2),
        ((4096,), 8448, 1),  # as many blocks as run at once
        ((4097,), 1024, 1),  # XLA makes parts of them
        ((256,), 1024, 1),  # it takes 1.3 us
        ((3989,), 1024, 1),  # a prime number
        ((1,), 1024, 1),
        ((4096,), 1, 1),
        ((0,), 1024, 1),
        ((4, 0, 64), 1024, 1),
        ((0, 64), 1024, 1),
    ],
)
def test_parts_fill_the_card_and_are_worth_a_kernel_more(lengths, columns, parts):
    found = Sum(1, lengths, columns)
    assert found.parts() == parts
    assert found.rows % parts == 0 and found.rows // parts >= min(found.rows, 32)
    if parts > 1:
        assert parts * columns / 32 > 0.9 * BLOCKS and found.longer(parts) < found.longer() / 1.5


def test_other_sums_beside_them_fill_it_as_well():
    assert Sum(1, (4096,), 1280).parts() > Sum(4, (4096,), 1280).parts() > 1
    assert Sum(32, (4096,), 1280).parts() == 1


def of(*shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(math.prod(shape)), shape, dtype)


def in_a_loop(x):
    return lax.scan(lambda total, a: (total + a.sum((0, 1)), a.sum(0)), jnp.zeros(x.shape[-1]), x)


CASES = {
    "bias": (lambda x: x.sum((0, 1)), of(16, 197, 1024), 1),
    "one dimension": (lambda x: x.sum(0), of(4096, 128), 1),
    "beside others": (lambda x: x.sum(1), of(2, 4096, 128), 1),
    "two sums": (lambda x: (x.sum((0, 1)), (x * x).sum((0, 1))), of(16, 197, 1024), 2),
    "in a loop": (in_a_loop, of(3, 16, 197, 1024), 1),
    "several columns": (lambda x: x.sum((0, 1)), of(16, 197, 16, 64), 1),
    "along rows": (lambda x: x.sum(-1), of(16, 197, 1024), 0),
    "apart": (lambda x: x.sum((0, 2)), of(64, 3, 64, 128), 0),
    "maxima": (lambda x: x.max((0, 1)), of(16, 197, 1024), 0),
    "whole numbers": (lambda x: x.sum((0, 1)), of(16, 197, 1024).astype(jnp.int32), 0),
}
"""What is summed, its operand, and how many sums are made in parts."""


def barriers(closed):
    """How many barriers `closed` has, with those in its loops."""
    found = 0
    for eqn in compat.open_jaxpr(closed).eqns:
        found += eqn.primitive.name == "optimization_barrier"
        found += barriers(eqn.params["jaxpr"]) if eqn.primitive.name == "scan" else 0
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_same(name):
    step, x, count = CASES[name]
    closed = jax.make_jaxpr(step)(x)
    parts = with_sums_in_parts(closed)
    assert barriers(parts) == count
    for a, b in zip(jaxpr_as_fun(parts)(x), jaxpr_as_fun(closed)(x), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-3)


def test_parts_in_16_bits_are_not_rounded():
    x = of(16, 197, 1024, dtype=jnp.bfloat16)
    closed = jax.make_jaxpr(lambda x: lax.reduce_sum(x, (0, 1)))(x)
    [found] = jaxpr_as_fun(with_sums_in_parts(closed))(x)
    exact = np.asarray(x, np.float64).sum((0, 1))
    rounded = jnp.asarray(exact, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16 and np.mean(np.asarray(found == rounded)) > 0.98


FEW = {
    "samples": (lambda x: x.sum(0), of(16, 256, 256), 2),
    "an odd number of them": (lambda x: x.sum(0), of(17, 256, 256), 3),
    "two dimensions": (lambda x: x.sum((0, 1)), of(2, 13, 256, 256), 4),
    "beside others": (lambda x: x.sum(1), of(2, 9, 256, 256), 2),
    "in a loop": (lambda x: lax.map(lambda a: a.sum(0), x), of(2, 24, 256, 256), 3),
    "in 16 bits": (
        lambda x: lax.reduce_sum(x, (0,)),
        of(31, 256, 256, dtype=jnp.bfloat16),
        4,
    ),
    "as many as are read at once": (lambda x: x.sum(0), of(8, 512, 512), 1),
    "several threads": (lambda x: x.sum(0), of(32, 256, 256), 1),
    "few elements": (lambda x: x.sum(0), of(16, 16, 256), 1),
    "along rows": (lambda x: x.sum(-1), of(256, 256, 16), 1),
    "apart": (lambda x: x.sum((0, 2)), of(4, 512, 4, 256), 1),
    "maxima": (lambda x: x.max(0), of(16, 256, 256), 0),
}
"""What is summed of few rows, its operand, and how many sums there are then."""


@pytest.mark.parametrize("name", FEW)
def test_one_thread_sums_few_rows_in_pieces(name):
    step, x, count = FEW[name]
    closed = jax.make_jaxpr(step)(x)
    pieces = with_sums_in_parts(closed)
    assert str(pieces).count("reduce_sum") == count
    assert barriers(pieces) == 0
    [a], [b] = jaxpr_as_fun(pieces)(x), jaxpr_as_fun(closed)(x)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    exact = b if x.dtype == jnp.float32 else np.asarray(x, np.float32).sum(0)
    np.testing.assert_allclose(a, exact, rtol=1e-2 if x.dtype == jnp.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.gpu_compile
def test_xla_makes_the_pieces_in_one_kernel():
    there = target("h200").sharding()
    x = jax.ShapeDtypeStruct((16, 256, 256), jnp.float32, sharding=there)
    closed = with_sums_in_parts(jax.make_jaxpr(lambda x: jnp.tanh(x).sum(0))(x))
    text = jax.jit(jaxpr_as_fun(closed)).lower(x).compile().as_text()
    [entry] = re.findall(r"^ENTRY .*?^}", text, re.MULTILINE | re.DOTALL)
    assert re.findall(r" fusion\(.*kind=(\w+)", entry) == ["kLoop"]


def step(params, x):
    def loss(params):
        w, bias = params
        return jnp.square(jnp.tanh(x @ w.astype(x.dtype) + bias.astype(x.dtype))).mean()

    return [p - 0.1 * d for p, d in zip(params, jax.grad(loss)(params), strict=True)]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("sub_batches", [1, 4])
def test_xla_makes_the_parts_in_one_kernel_and_adds_them_up_where_they_are_read(sub_batches):
    shapes = ((1024, 1024), jnp.float32), ((1024,), jnp.float32)
    params = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    x = jax.ShapeDtypeStruct((16 * sub_batches, 197, 1024), jnp.bfloat16)
    options = {"policy": "exact", "donate_argnums": 0, "sub_batches": sub_batches}
    compiled = vmem_jax.jit(step, budget="1GiB", **options).lower(params, x)
    text = compiled.compile(target="h200").as_text()
    assert re.search(r"f32\[8,1024\]\S*(, \S+)*\)? fusion\(.*kind=kInput", text)
    assert not re.search(r"(f32|bf16)\[1024\]\S* fusion\(.*kind=kInput", text)
