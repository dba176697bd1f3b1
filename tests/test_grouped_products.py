"""Attention whose queries share keys in groups: values, and what is transposed on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.grouped_products import with_grouped_products
from vmem_jax.capture.loop_pairs import find_pairs

N, T, H, G, D = 2, 24, 3, 4, 8
SCORES = N * T * H * G * T


def causal(scores):
    return jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)


def by_einsum(q, k, v):
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(N, T, H, G, D), k)
    weights = jax.nn.softmax(causal(scores))
    return jnp.einsum("bkgts,bskd->btkgd", weights, v)


def tokens_first(q, k, v):
    """Scores in the order of the queries, reduced over their last dimension."""
    scores = jnp.einsum("btkgd,bskd->btkgs", q.reshape(N, T, H, G, D), k)
    mask = jnp.tril(jnp.ones((T, T), bool))[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("btkgs,bskd->btkgd", weights, v)


def keys_first(q, k, v):
    scores = jnp.einsum("bskd,btkgd->bkgts", k, q.reshape(N, T, H, G, D))
    weights = jax.nn.softmax(causal(scores * 0.3))
    return jnp.einsum("bskd,bkgts->btkgd", v, weights)


def by_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def by_groups(q, k, v):
    """Each query of a group by itself, and their dropout."""

    def one(q, key):
        weights = jax.nn.softmax(causal(jnp.einsum("btkd,bskd->bkts", q, k)))
        weights = weights * jax.random.bernoulli(key, 0.9, weights.shape)
        return jnp.einsum("bkts,bskd->btkd", weights, v)

    keys = jax.random.split(jax.random.key(0), G)
    return jax.vmap(one, (3, 0), 3)(q.reshape(N, T, H, G, D), keys)


def of_one_query(q, k, v):
    """Groups of one."""
    return jax.nn.dot_product_attention(q[:, :, :H], k, v, is_causal=True)


ATTENTIONS = [by_einsum, tokens_first, keys_first, by_jax, by_groups, of_one_query]


def args():
    keys = jax.random.split(jax.random.key(1), 3)
    heads = (G * H, H, H)
    return [jax.random.normal(k, (N, T, h, D)) for k, h in zip(keys, heads, strict=True)]


def loss(attention):
    return lambda q, k, v: jnp.sin(attention(jnp.tanh(q), k, v)).sum()


def transposed(flat, least=SCORES):
    """The transposes of at least so many elements."""
    found = []
    for eqn in compat.open_jaxpr(flat).eqns:
        if eqn.primitive.name == "transpose" and eqn.outvars[0].aval.size >= least:
            shape, order = eqn.invars[0].aval.shape, eqn.params["permutation"]
            long = [d for d in order if shape[d] > 1]
            found += [eqn] * (long != sorted(long))
    return found


def products(flat):
    """How many dimensions are rows, columns and summed in each product of a batch."""
    for eqn in compat.open_jaxpr(flat).eqns:
        if eqn.primitive.name == "dot_general" and any(eqn.params["dimension_numbers"][1]):
            contracted, batches = eqn.params["dimension_numbers"]
            ranks = [len(a.aval.shape) - len(batches[0]) - len(contracted[0]) for a in eqn.invars]
            yield *ranks, len(contracted[0])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_values_stay(attention):
    step = jax.value_and_grad(loss(attention), (0, 1, 2))
    flat = flatten(jax.make_jaxpr(step)(*args()))
    grouped = with_grouped_products(flat, "gpu")
    compat.check_jaxpr(grouped)
    expected = jax.tree.leaves(jax.jit(step)(*args()))
    for a, b in zip(expected, jax.jit(jaxpr_as_fun(grouped))(*args()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", [by_einsum, keys_first, by_jax])
def test_scores_are_not_transposed(attention):
    flat = flatten(jax.make_jaxpr(jax.grad(loss(attention), (0, 1, 2)))(*args()))
    assert transposed(flat)
    grouped = with_grouped_products(flat, "gpu")
    assert not transposed(grouped)
    assert [*products(grouped)] == 6 * [(1, 1, 1)]


def by_heads(q, k, v):
    """As many keys as queries."""
    weights = jax.nn.softmax(causal(jnp.einsum("bthd,bshd->bhts", q[:, :, :H], k)))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


@pytest.mark.parametrize(("attention", "platform"), [(by_heads, "gpu"), (by_einsum, "cpu")])
def test_other_steps_are_left_alone(attention, platform):
    flat = flatten(jax.make_jaxpr(jax.grad(loss(attention), (0, 1, 2)))(*args()))
    assert with_grouped_products(flat, platform) is flat


@pytest.mark.parametrize("attention", [by_einsum, by_jax])
def test_scores_in_loops_are_not_transposed(attention):
    def layers(ws, x, q):
        _, k, v = args()

        def layer(x, w):
            out = attention(q * x, k * w, v)
            return x + out.mean(), None

        return jax.lax.scan(layer, x, ws)[0]

    ws = jnp.linspace(0.5, 1.5, 4)
    traced = jax.jit(jax.grad(layers)).trace(ws, jnp.float32(1), args()[0])
    [pair] = find_pairs(capture(traced.jaxpr, platform="gpu").separate, "gpu")
    assert not transposed(pair.body)
    [plain] = find_pairs(capture(traced.jaxpr, platform="gpu").separate)
    assert transposed(plain.body)
