"""Attention as it is written, captured for a GPU: values, and whole rows in front of products and
behind them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.whole_rows import with_whole_rows

N, T, H, D = 2, 12, 4, 8


def by_einsum(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhqk", q, k))
    return jnp.einsum("nhqk,nkhd->nqhd", weights, v)


def heads_first(q, k, v):
    q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
    weights = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2))
    return (weights @ v).transpose(0, 2, 1, 3)


def shared_keys(q, k, v):
    """Half as many keys and values as queries."""
    k, v = k[:, :, ::2], v[:, :, ::2]
    q = q.reshape(N, T, H // 2, 2, D)
    weights = jax.nn.softmax(jnp.einsum("nqhgd,nkhd->nhgqk", q, k))
    return jnp.einsum("nhgqk,nkhd->nqhgd", weights, v).reshape(N, T, H, D)


def with_sizes_first(q, k, v):
    """Products that make heads of [size, tokens], which nothing transposes."""
    weights = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhkq", q, k), 2)
    return jnp.einsum("nhkq,nkhd->nhdq", weights, v).reshape(N, T, H, D)


ATTENTIONS = {f.__name__: f for f in (by_einsum, heads_first, shared_keys, with_sizes_first)}
CUTS = {
    "unpacked": lambda y: jnp.moveaxis(y.reshape(N, T, 3, H, D), 2, 0),
    "split": lambda y: [a.reshape(N, T, H, D) for a in jnp.split(y, 3, -1)],
    "by head": lambda y: jnp.moveaxis(y.reshape(N, T, H, 3, D), 3, 0),
    "by position": lambda y: jnp.stack([y.reshape(N, T, 3, H, D)[:, :, i] for i in range(3)]),
    "with biases": lambda y: [a.reshape(N, T, H, D) + 0.1 for a in jnp.split(y, 3, -1)],
}


def gradients(attention, cut):
    def loss(w, out, x):
        q, k, v = CUTS[cut](jnp.tanh(x) @ w)
        return jnp.sin(ATTENTIONS[attention](q, k, v).reshape(N, T, -1) @ out).sum()

    return jax.grad(loss, (0, 1, 2))


def args():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (H * D, 3 * H * D), (H * D, H * D), (N, T, H * D)
    return [jax.random.normal(k, s) / s[-1] ** 0.5 for k, s in zip(keys, shapes, strict=True)]


def captured(attention, cut):
    return capture(jax.jit(gradients(attention, cut)).trace(*args()).jaxpr, platform="gpu")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_values_stay(attention, cut):
    flat = captured(attention, cut).flat
    compat.check_jaxpr(flat)
    expected = jax.jit(gradients(attention, cut))(*args())
    for a, b in zip(expected, jax.jit(jaxpr_as_fun(flat))(*args()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("attention", ["by_einsum", "heads_first"])
def test_products_read_and_make_whole_rows(attention, cut):
    eqns = compat.open_jaxpr(captured(attention, cut).flat).eqns
    products = [e for e in eqns if e.primitive.name == "dot_general"]
    products = [e for e in products if any(e.params["dimension_numbers"][1])]
    assert len(products) == 6
    made = {v for e in products for v in e.outvars}
    turned = [e for e in eqns if e.primitive.name == "transpose" and e.invars[0] in made]
    rows = lambda e: e.params["permutation"][-1] == len(e.params["permutation"]) - 1
    assert turned and all(map(rows, turned))
    for e in products:  # of queries, keys and values the batch dimensions lead
        assert e.params["dimension_numbers"][1] == ((0, 1), (0, 1))


def test_nothing_is_unpacked_of_what_is_transposed():
    found = captured("by_einsum", "unpacked")
    eqns = compat.open_jaxpr(found.flat).eqns
    turned = {v for e in eqns if e.primitive.name == "transpose" for v in e.outvars}
    cut = [e for e in eqns if e.primitive.name in ("slice", "unstack")]
    assert len(cut) == 3 and turned.isdisjoint(e.invars[0] for e in cut)
    assert "stack" not in {step.op for step in found.program.steps if not step.fusible}


@pytest.mark.parametrize("platform", ["cpu", ""])
def test_only_gpus_change(platform):
    flat = jax.jit(gradients("by_einsum", "unpacked")).trace(*args()).jaxpr
    assert with_whole_rows(flat, platform) is flat


@pytest.mark.gpu_compile
def test_a_gpu_copies_each_of_queries_keys_and_values_once():
    n, t, h, d = 8, 197, 4, 64

    def loss(w, out, x):
        q, k, v = jnp.moveaxis((x @ w).reshape(n, t, 3, h, d), 2, 0)
        return by_einsum(q, k, v).reshape(n, t, -1).astype(jnp.float32).sum() + (x @ out).sum()

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    given = shape(h * d, 3 * h * d), shape(h * d, h * d), shape(n, t, h * d)
    step = vmem_jax.jit(jax.grad(loss, (0, 1)), budget="1GiB", policy="exact")
    text = step.lower(*given).compile(target="h200").as_text()
    entry = text[text.index("ENTRY") :]
    assert f"bf16[3,{n}" not in entry and f"{d},{t}]" not in entry


@pytest.mark.parametrize("tokens", [T, 16])
def test_heads_that_a_chain_makes_are_transposed_for_products_where_rows_are_not_aligned(tokens):
    scores = lambda q, k: jnp.einsum("nqhd,nkhd->nhqk", q + 1, k + 1)
    given = [jax.ShapeDtypeStruct((N, tokens, H, D), jnp.float32)] * 2
    flat = with_whole_rows(jax.jit(scores).trace(*given).jaxpr, "gpu")
    [product] = [e for e in compat.open_jaxpr(flat).eqns if e.primitive.name == "dot_general"]
    batch = (0, 1) if tokens % 8 else (0, 2)
    assert product.params["dimension_numbers"][1] == (batch, batch)


@pytest.mark.gpu_compile
def test_products_of_heads_with_biases_read_no_transposed_keys():
    """As Flax makes them: each of a product and a bias of its own, and 197 tokens are padded."""
    n, t, h, d = 8, 197, 4, 64

    def loss(ws, biases, x):
        made = (jnp.einsum("ntc,chd->nthd", x, w) + b for w, b in zip(ws, biases, strict=True))
        return jnp.sin(by_einsum(*made).astype(jnp.float32)).sum()

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    given = [shape(h * d, h, d)] * 3, [shape(h, d)] * 3, shape(n, t, h * d)
    step = vmem_jax.jit(jax.grad(loss, (0, 1)), budget="1GiB", policy="exact")
    text = step.lower(*given).compile(target="h200").as_text()
    assert f"bf16[{n * h},200,{d}]" in text and f"bf16[{n * h},{d},200]" not in text


@pytest.mark.parametrize("attention", ["by_einsum", "heads_first"])
def test_what_two_products_read_is_transposed_once(attention):
    """What attention returns, for the product behind it and for the gradient to its weights."""
    found = captured(attention, "split").program
    batched = {b for step in found.steps if step.batched for b in step.writes}
    once = [s for s in found.steps if s.op == "layout_constraint" and batched & {*s.reads}]
    assert once and all(step.fusible for step in once)
    for step in once:
        readers = [found.steps[r].op for b in step.writes for r in found.readers[b]]
        assert readers.count("dot_general") >= 2
        [made] = batched & {*step.reads}
        assert not found.steps[found.producer[made]].behind  # no passes of the products' own
