"""The gradient to a softmax's scores by its weights: values, where it is, and what is left alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.softmax_gradients import with_softmax_gradients

N, T = 4, 64


def causal(x):
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), x, -jnp.inf))


def dropped(x):
    weights = jax.nn.softmax(x)
    return weights * jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)


def rounded(x):
    return jax.nn.softmax(3 * x).astype(jnp.bfloat16).astype(jnp.float32)


def of_columns(x):
    return jax.nn.softmax(x, 1)


def of_uneven_rows(x):
    return jax.nn.softmax(x[..., :-7])


def log_of(x):
    return jax.nn.log_softmax(x)


def gradients(of):
    weights = jnp.linspace(-1, 1, N * T * T).reshape(N, T, T)
    loss = lambda x: (of(x) * weights[..., : of(x).shape[-1]]).sum()
    return jax.value_and_grad(loss)


def scores():
    return jax.random.normal(jax.random.key(1), (N, T, T))


def squares(flat):
    """Quotients by the square of a sum, as AD has them."""
    found = [e for e in compat.open_jaxpr(flat).eqns if e.primitive.name == "integer_pow"]
    return sum(e.params["y"] == -2 for e in found)


@pytest.mark.parametrize("of", [causal, dropped, rounded])
def test_rows_have_their_gradient_by_the_weights(of):
    flat = flatten(jax.make_jaxpr(gradients(of))(scores()))
    assert squares(flat)
    other = with_softmax_gradients(flat, "gpu")
    compat.check_jaxpr(other)
    assert not squares(other)
    expected = jax.jit(gradients(of))(scores())
    for a, b in zip(expected, jax.jit(jaxpr_as_fun(other))(scores()), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def scaled(x):
    """The exponentials are read by themselves, too."""
    most = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    exponentials = jnp.exp(x - most)
    return exponentials / exponentials.sum(-1, keepdims=True) + 0.1 * exponentials


def of_others(x):
    """The sum is that of other rows."""
    most = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    exponentials = jnp.exp(x - most)
    return exponentials / jnp.roll(exponentials, 1, 0).sum(-1, keepdims=True)


@pytest.mark.parametrize("of", [scaled, of_others, of_columns, of_uneven_rows, log_of])
def test_others_keep_their_values(of):
    step = gradients(of)
    flat = flatten(jax.make_jaxpr(step)(scores()))
    other = with_softmax_gradients(flat, "gpu")
    for a, b in zip(step(scores()), jaxpr_as_fun(other)(scores()), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    if of is not scaled:
        assert other is flat


def test_on_a_cpu_nothing_changes():
    flat = flatten(jax.make_jaxpr(gradients(causal))(scores()))
    assert with_softmax_gradients(flat, "cpu") is flat


def test_it_overflows_no_sooner():
    """Of a row of one large score, whose other weights are zero."""
    x = scores().at[0, 0].set(-3e38).at[0, 0, 0].set(3e38)
    step = functools.partial(gradients(jax.nn.softmax))
    flat = with_softmax_gradients(flatten(jax.make_jaxpr(step)(x)), "gpu")
    _, gradient = jaxpr_as_fun(flat)(x)
    np.testing.assert_array_equal(gradient[0, 0], jnp.zeros(T))


def layers(ws, x):
    """Sixteen layers of attention, whose weights products read rounded."""
    x = x.astype(jnp.bfloat16)
    for w in ws:
        q = jnp.tanh(x @ w)
        scores = (q @ x.mT).astype(jnp.float32)
        x = x + causal(scores).astype(x.dtype) @ (x @ w.mT)
    return x.astype(jnp.float32).sum()


def test_weights_do_not_exist_in_float32():
    ws, x = jnp.ones((16, T, T), jnp.bfloat16), jnp.ones((N, T, T))
    closed = jax.make_jaxpr(jax.grad(layers))(list(ws), x)
    captured = capture(closed, platform="gpu")
    assert not squares(captured.flat)
    rows = [v for v in captured.variables if v.aval.shape == (N, T, T)]
    assert {
        v.aval.dtype.name for v in rows if v not in compat.open_jaxpr(captured.flat).invars
    } == {"bfloat16"}
