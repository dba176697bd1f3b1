"""What `allow` names and what has nothing to do is skipped with a line; alone it is an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vmem_jax

w, x = jnp.full((64, 64), 0.01), jnp.ones((128, 64))


def step(w, x):
    """Without a convolution, a loop or a value on the host; the batch is normalised as a whole."""

    def loss(w):
        y = jnp.tanh(x @ w)
        y = y - y.mean(0)
        return jnp.mean(jnp.tanh(y @ w) ** 2)

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


@pytest.mark.parametrize("name", ["stream", "sub_batches", "workspace", "carry"])
def test_what_has_nothing_to_do_is_skipped_with_a_line(name):
    allow = ("order", "recompute", name)
    budgeted = vmem_jax.jit(step, budget="1GiB", allow=allow)
    for ours, plain in zip(budgeted(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5)
    text = " ".join(str(budgeted.explain(w, x)).split())
    assert f"{name} is not used: " in text
    assert "recompute is not used" not in text


@pytest.mark.parametrize("name", ["stream", "sub_batches", "workspace", "carry"])
def test_alone_it_is_an_error(name):
    with pytest.raises(vmem_jax.TechniqueError, match="cannot"):
        vmem_jax.jit(step, budget="1GiB", allow=(name,))(w, x)


def test_what_a_policy_needs_is_an_error():
    with pytest.raises(vmem_jax.TechniqueError, match="cannot divide convolutions"):
        vmem_jax.jit(step, budget="1GiB", policy="ucudnn")(w, x)


@pytest.mark.parametrize("allow", [("offload",), ("order", "recompute", "offload"), None])
def test_auto_never_ends_in_another_policys_error(allow):
    """Policies that look for layers find none here, where nothing is trained."""

    def step(w, x):
        y = jax.nn.gelu(jnp.cumsum(x[:, ::-1], -1) + x * 0.5)
        value, grad = jax.value_and_grad(lambda w: jnp.mean(y**2))(w)
        return w - grad, value

    with pytest.raises(vmem_jax.BudgetError, match="policy `auto` cannot fit"):
        vmem_jax.jit(step, budget=0.1, allow=allow).lower(w, x).compile()
