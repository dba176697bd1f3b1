"""Softmaxes whose rows fill a tile of Triton are reduced in the kernels that read them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.capture.softmax import fits

N, H, D = 2, 4, 64


def attention(q, k, v, mask, bias):
    scores = jnp.einsum("nhqd,nhkd->nhqk", q, k).astype(jnp.float32) / 8
    return jnp.einsum("nhqk,nhkd->nhqd", jax.nn.softmax(scores).astype(q.dtype), v)


def masked(q, k, v, mask, bias):
    """Causal, and with dropout of the weights."""
    scores = jnp.einsum("nhqd,nhkd->nhqk", q, k).astype(jnp.float32) / 8
    seen = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(seen).astype(q.dtype)
    return jnp.einsum("nhqk,nhkd->nhqd", jnp.where(mask, weights / 0.9, 0).astype(q.dtype), v)


def biased(q, k, v, mask, bias):
    """With a bias that is trained: the gradient to the scores is summed over samples, too."""
    scores = jnp.einsum("nhqd,nhkd->nhqk", q, k).astype(jnp.float32) / 8 + bias
    return jnp.einsum("nhqk,nhkd->nhqd", jax.nn.softmax(scores).astype(q.dtype), v)


def with_sums(q, k, v, mask, bias):
    """The sums are read beside the rows."""
    scores = jnp.einsum("nhqd,nhkd->nhqk", q, k).astype(jnp.float32) / 8
    out = jnp.einsum("nhqk,nhkd->nhqd", jax.nn.softmax(scores).astype(q.dtype), v)
    most = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    sums = jnp.exp(scores - most).sum(-1)
    return out * jnp.log(sums)[..., None].astype(q.dtype)


def arguments(length):
    heads = jax.ShapeDtypeStruct((N, H, length, D), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((N, H, length, length), jnp.bool_)
    bias = jax.ShapeDtypeStruct((H, length, length), jnp.float32)
    return heads, heads, heads, mask, bias


def gradients(function):
    def step(q, k, v, mask, bias):
        loss = lambda q, k, v, bias: jnp.sin(function(q, k, v, mask, bias)).sum()
        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias)

    return step


def reductions(function, length, platform="gpu"):
    """Steps that reduce rows."""
    trace = jax.jit(gradients(function)).trace(*arguments(length))
    steps = capture(trace.jaxpr, platform=platform).program.steps
    return sum(step.op in ("reduce_max", "reduce_sum") for step in steps)


@pytest.mark.parametrize(
    ("function", "length", "count"),
    [
        (attention, 256, 0),
        (masked, 256, 0),
        (attention, 197, 4),
        (masked, 197, 4),
        (biased, 256, 5),
        (with_sums, 256, 7),
    ],
)
def test_reductions_are_where_rows_are_read(function, length, count):
    assert reductions(function, length) == count


def test_the_cpu_reduces_in_kernels_of_its_own():
    assert reductions(attention, 256, "cpu") == 4


def test_rows_that_fill_a_tile():
    lengths = (1, 2, 49, 64, 197, 256, 500, 900, 1000, 1024, 16384, 32768)
    assert [n for n in lengths if fits(n)] == [2, 64, 256, 500, 1000, 1024, 16384]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("function", [attention, masked])
def test_xla_makes_one_kernel_forward_and_one_backward(function):
    length = 512
    step = vmem_jax.jit(gradients(function), budget="1GiB", policy="exact")
    compiled = step.lower(*arguments(length)).compile(target="h200")
    [entry] = re.findall(r"^ENTRY .*?^}", compiled.as_text(), re.MULTILINE | re.DOTALL)
    rows = rf"bf16\[{N},{H},{length},{length}\]"
    assert len(re.findall(rf"= {rows}\S* fusion\(", entry)) == 2
    assert not re.findall(rf"= f32\[{N},{H},{length}\]\S* fusion\(", entry)
