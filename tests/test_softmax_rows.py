"""Softmaxes whose rows fill a tile of Triton are reduced in the kernels that read them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.capture.counted_masks import with_counted_masks
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.softmax import as_summed_apart, fits
from vmem_jax.core.program import Phase

N, H, D = 2, 4, 64


def scores_of(q, k):
    return jnp.einsum("nhqd,nhkd->nhqk", q, k).astype(jnp.float32) / 8


def seen_causally(scores):
    return jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)


def weighed(weights, v):
    return jnp.einsum("nhqk,nhkd->nhqd", weights.astype(v.dtype), v)


def attention(q, k, v, mask, bias):
    return weighed(jax.nn.softmax(scores_of(q, k)), v)


def masked(q, k, v, mask, bias):
    """Causal, and with dropout of the weights."""
    weights = jax.nn.softmax(seen_causally(scores_of(q, k))).astype(q.dtype)
    return weighed(jnp.where(mask, weights / 0.9, 0), v)


def unevenly_masked(q, k, v, mask, bias):
    """By a mask that is given for each sample: its heads share it."""
    return weighed(jax.nn.softmax(jnp.where(mask[:, :1], scores_of(q, k), -jnp.inf)), v)


def by_jax(q, k, v, mask, bias):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def by_jax_of_all(q, k, v, mask, bias):
    """Without a mask: the scores have a dimension of one element, which is moved on the way."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v)


def grouped(q, k, v, mask, bias):
    """Half as many keys and values as queries: the rows are transposed on the way, as written."""
    return by_jax(q, k[:, ::2], v[:, ::2], mask, bias)


def by_flax(q, k, v, mask, bias):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    causal = nn.make_causal_mask(jnp.ones(q.shape[:2]))
    return nn.dot_product_attention(q, k, v, mask=causal)


def biased(q, k, v, mask, bias):
    """With a bias that is trained: the gradient to the scores is summed over samples, too."""
    return weighed(jax.nn.softmax(scores_of(q, k) + bias), v)


def with_sums(q, k, v, mask, bias):
    """The sums are read beside the rows."""
    scores = scores_of(q, k)
    out = weighed(jax.nn.softmax(scores), v)
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
        (by_jax, 256, 0),
        (by_jax_of_all, 256, 0),
        (by_flax, 256, 0),
        (grouped, 256, 0),
        (attention, 197, 4),
        (masked, 197, 4),
        (unevenly_masked, 256, 3),
        (attention, 2048, 0),
        (masked, 2048, 3),
        (biased, 256, 4),
        (with_sums, 256, 6),
    ],
)
def test_reductions_are_where_rows_are_read(function, length, count):
    assert reductions(function, length) == count


def printed(q, k, v, mask, bias):
    scores = scores_of(q, k)
    weights = jax.nn.softmax(scores)
    jax.debug.print("{} {}", weights, scores.max(-1))
    return weighed(weights, v)


def of_numbers(q, k, v, mask, bias):
    """Softmaxes of counts, and of what many equations make."""
    y = q @ k.swapaxes(2, 3)
    for _ in range(600):
        y = jnp.sin(y)
    places = jax.nn.softmax(jax.lax.broadcasted_iota(jnp.float32, y.shape, 3))
    return (jax.nn.softmax(y) + places.astype(y.dtype)) @ v


@pytest.mark.parametrize("function", [printed, of_numbers])
def test_anything_may_read_a_softmax_and_make_its_rows(function):
    step = vmem_jax.jit(gradients(function), budget="1GiB")
    context = step.context(arguments(256), {}, "h200")
    assert sum(context.plain_costs.seconds) > 0


def test_exponentials_may_be_of_numbers_and_of_values_less_a_bounded_one():
    def step(x):
        return jnp.exp(1.0) * jnp.exp(x - jnp.maximum(0.5, x)) + jnp.exp(x - jnp.maximum(x, 0.5))

    trace = jax.jit(step).trace(jax.ShapeDtypeStruct((8, 13), jnp.float32))
    assert capture(trace.jaxpr, platform="gpu").program.steps


def test_the_cpu_reduces_in_kernels_of_its_own():
    assert reductions(attention, 256, "cpu") == 4


MASKS = {
    "tril": lambda x: jnp.tril(jnp.ones(x.shape[-2:], bool)),
    "band": lambda x: (i := jnp.arange(x.shape[-1]))[:, None] - i < 5,
    "columns": lambda x: jnp.arange(x.shape[-1]) % 3 > 0,
    "rows": lambda x: (jnp.arange(x.shape[-2]) > 2)[:, None] & (jnp.arange(x.shape[-1]) < 60),
    "first of heads": lambda x: (jnp.arange(x.shape[1]) < 1)[:, None, None] | MASKS["tril"](x),
    "a single count": lambda x: jnp.arange(1)[:, None] <= jnp.arange(x.shape[-1]) - 3,
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_counted_for_the_whole_array(mask):
    softmax = lambda x: jax.nn.softmax(jnp.where(MASKS[mask](x), x, -1e9))
    x = jax.random.normal(jax.random.key(0), (N, H, 64, 64))
    flat = flatten(jax.jit(softmax).trace(x).jaxpr)
    counted = with_counted_masks(flat, "gpu")
    spread = lambda jaxpr: [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "broadcast_in_dim"
        and eqn.invars[0].aval.size > 1
        and eqn.outvars[0].aval.size == x.size
    ]
    assert spread(flat.jaxpr) and not spread(counted.jaxpr)
    np.testing.assert_array_equal(jaxpr_as_fun(counted)(x)[0], softmax(x))


def test_only_counted_masks_change():
    masked = lambda x, mask: jax.nn.softmax(jnp.where(mask, x, -1e9))
    causal = lambda x: masked(x, jnp.tril(jnp.ones(x.shape[-2:], bool)))
    x, short = jnp.ones((N, H, 64, 64)), jnp.ones((N, H, 49, 49))
    flat_of = lambda fun, *args: flatten(jax.jit(fun).trace(*args).jaxpr)
    for flat in (flat_of(masked, x, x[0, 0] > 0), flat_of(causal, short)):
        assert with_counted_masks(flat, "gpu") is flat
    flat = flat_of(causal, x)
    assert with_counted_masks(flat, "cpu") is flat


def causal(q, k, v, mask, bias):
    return weighed(jax.nn.softmax(seen_causally(scores_of(q, k))), v)


def test_counting_takes_no_time():
    def flops(function):
        trace = jax.jit(function).trace(*arguments(256))
        [rows] = [s for s in capture(trace.jaxpr, platform="gpu").program.steps if s.fusible]
        return rows.flops

    of_all = N * H * 256 * 256
    assert flops(causal) == flops(attention) + of_all  # the choice of what is seen


@pytest.mark.parametrize(
    ("function", "length", "reads", "shared"),
    [(attention, 256, 1, 1.0), (causal, 256, 1, 1.5), (attention, 197, 0, 1.0)],
)
def test_plain_jit_reads_rows_for_their_sums_and_shares_masks(function, length, reads, shared):
    step = vmem_jax.jit(gradients(function), budget="1GiB")
    context = step.context(arguments(length), {}, "h200")
    program, eqns = context.traced.captured.program, context.traced.captured.flat.jaxpr.eqns
    costs = context.costs
    plain = as_summed_apart(costs, program, eqns, context.machine)
    less = zip(program.steps, costs.seconds, plain.seconds, strict=True)
    changed = [(s, before, after) for s, before, after in less if before != after]
    read = N * H * length * length * 2 / context.machine.bandwidth
    forward = [after - shared * before for s, before, after in changed if s.phase is Phase.FORWARD]
    assert forward == [pytest.approx(read)] * reads
    backward = [after / before for s, before, after in changed if s.phase is Phase.BACKWARD]
    assert backward == [pytest.approx(shared)] * (shared > 1)


def test_rows_that_fill_a_tile():
    lengths = (1, 2, 49, 64, 197, 256, 500, 900, 1000, 1024, 16384, 32768)
    assert [n for n in lengths if fits((16, n))] == [2, 64, 256, 500, 1000, 1024, 16384]
    assert [n for n in lengths if fits((16, n), counted=True)] == [2, 64, 256, 500, 1000, 1024]
    rows = (1, 4, 8, 197, 200)
    assert [n for n in rows if fits((3, n, 256))] == [8, 200]
    assert [n for n in rows if fits((3, n, 1, 256))] == [8, 200]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("function", [attention, masked, by_jax, by_jax_of_all, by_flax])
def test_xla_makes_one_kernel_forward_and_one_backward(function):
    length = 512
    step = vmem_jax.jit(gradients(function), budget="1GiB", policy="exact")
    compiled = step.lower(*arguments(length)).compile(target="h200")
    [entry] = re.findall(r"^ENTRY .*?^}", compiled.as_text(), re.MULTILINE | re.DOTALL)
    rows = rf"= bf16\[[\d,]*{length},(?:\d,)?{length}\]\S* fusion\(.*kind=kCustom.*__triton\".*"
    made = re.findall(rows, entry)
    assert len(made) == 2
    assert not re.findall(rf"= f32\[(?:\d,)+{length}\]\S* fusion\(", entry)
    # of rows that lie together: of those of several heads XLA's kernels take several times as long
    for kernel in made:
        [tile] = re.findall(r'"output_tiles":\[{"sizes":\[([^\]]*)\]', kernel)
        assert re.fullmatch(rf'("1",)*"\d+",("1",)?"{length}"', tile), tile
