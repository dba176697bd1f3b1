"""Steps without a backward pass are planned as others are: by order, recomputation and rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vmem_jax
from vmem_jax.core.need import need_nbytes

HEADS, ROWS, HIDDEN, WIDTH = 5, 2048, 256, 32
LARGE = 4 * ROWS * HIDDEN
"""Bytes of one hidden activation."""

wide = np.random.default_rng(0).normal(size=(WIDTH, HIDDEN)).astype(np.float32) / 8
narrow = np.random.default_rng(1).normal(size=(HIDDEN, WIDTH)).astype(np.float32) / 16
rows = np.random.default_rng(2).normal(size=(ROWS, WIDTH)).astype(np.float32)


def heads(w, v, x):
    """Hidden activations that nothing orders: XLA makes all of them first.

    Newer XLA:CPU runs products, sines and sums as one library call, whose memory it does not count,
    but sorts nothing there.
    """
    hidden = [jnp.sort(x @ (w * i), -1) for i in range(1, HEADS + 1)]
    return [jnp.sort(h @ v, -1)[:, -1].sum() for h in hidden]


def kept(w, v, x):
    """A hidden activation that is read once more, behind two others at a time."""
    first = jnp.sin(x @ w)
    y = jnp.sin(first @ v)
    for _ in range(2):
        y = jnp.sin((jnp.sin(y @ w) * jnp.sin(y @ (2 * w))) @ v)
    return jnp.sin((first * y[:, :1]) @ v)


def loss_of(forward):
    """A step whose loss does not depend on the parameters that are differentiated."""

    def step(w, v, x):
        loss, grad = jax.value_and_grad(lambda _: jnp.sum(sum(forward(w, v, x))))(v)
        return v - 0.1 * grad, loss

    return step


def compiled(step, budget, *allow, **options):
    found = vmem_jax.jit(step, budget=budget, allow=allow, **options).lower(wide, narrow, rows)
    return found.compile()


def need_of(step):
    jitted = jax.jit(step, keep_unused=True)
    return need_nbytes(jitted.lower(wide, narrow, rows).compile())


@pytest.mark.parametrize("step", [heads, loss_of(heads)])
def test_order_keeps_one_of_what_is_independent(step):
    plain = need_of(step)
    assert plain > HEADS * LARGE
    found = compiled(step, 0.5, "order")
    assert found.plan.fenced and not found.plan.recomputed
    assert need_nbytes(found) < 2 * LARGE + rows.nbytes
    ours, expected = found(wide, narrow, rows), jax.jit(step)(wide, narrow, rows)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)


def test_what_is_read_late_is_recomputed():
    plain = need_of(kept)
    assert plain > 3 * LARGE
    with pytest.raises(vmem_jax.BudgetError):
        compiled(kept, 0.8, "order")
    found = compiled(kept, 0.8, "order", "recompute")
    assert found.plan.recomputed
    assert need_nbytes(found) <= 0.8 * plain
    expected = jax.jit(kept)(wide, narrow, rows)
    np.testing.assert_allclose(found(wide, narrow, rows), expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_pure_function_run_in_parts():
    plain = need_of(kept)
    found = compiled(kept, 0.5, "sub_batches", batch_argnums=2)
    assert found.plan.sub_batches > 1
    assert need_nbytes(found) <= 0.5 * plain
    expected = jax.jit(kept)(wide, narrow, rows)
    np.testing.assert_allclose(found(wide, narrow, rows), expected, rtol=1e-4, atol=1e-4)
