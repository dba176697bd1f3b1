"""stacks: loops on a GPU write the slices of their stacks where they are made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.rewrite.stacks import LEAST_NBYTES, with_written_stacks
from vmem_jax.techniques import context

SIDE = 512  # a slice has LEAST_NBYTES


def layer(x, w):
    y = jnp.tanh(x @ w)
    return y * jnp.sin(y), (y, y[0])


def forwards(ws, x):
    return jax.lax.scan(layer, x, ws)


def backwards(ws, x):
    return jax.lax.scan(layer, x, ws, reverse=True)


def twice_alike(ws, x):
    def body(x, w):
        y = jnp.tanh(x @ w)
        return y * y, (y, w, y)

    return jax.lax.scan(body, x, ws)


def in_a_loop(ws, x):
    return jax.lax.scan(lambda x, _: jax.lax.scan(layer, x, ws), x, length=2)


def unrolled(ws, x):
    return jax.lax.scan(layer, x, ws, unroll=2)


def read_by_nothing(ws, x):
    return jax.lax.scan(lambda x, w: (x @ w, jnp.tanh(x)), x, ws)


def of_small_slices(ws, x):
    return jax.lax.scan(lambda x, w: (x @ w, x[:1]), x, ws)


@pytest.fixture(scope="module")
def args():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (4, SIDE, SIDE)) / 16, jax.random.normal(
        keys[1], (SIDE, SIDE)
    )


def written(closed):
    """How many stacks loops write themselves, in their bodies or those in them."""
    count = 0
    for eqn in compat.open_jaxpr(closed).eqns:
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"]
            names = [each.primitive.name for each in compat.open_jaxpr(body).eqns]
            count += names.count("dynamic_update_slice") + written(body)
    return count


@pytest.mark.parametrize(
    "step, count",
    [
        (forwards, 1),
        (backwards, 1),
        (unrolled, 1),
        (in_a_loop, 1),
        (twice_alike, 1),
        (read_by_nothing, 0),
        (of_small_slices, 0),
    ],
)
def test_results_are_the_same(step, count, args):
    assert args[1].nbytes == LEAST_NBYTES
    before = jax.make_jaxpr(step)(*args)
    after = with_written_stacks(before)
    assert written(before) == 0 and written(after) == count
    flat = jax.tree.leaves(args)
    expected, got = (jax.jit(jaxpr_as_fun(one))(*flat) for one in (before, after))
    for e, g in zip(expected, got, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu_compile
def test_slices_are_written_by_what_makes_them(monkeypatch):
    """Without that XLA makes the value beside the stack, and copies it there."""

    def step(ws, x):
        def layer(x, w):
            y = jnp.tanh(jnp.sin(x) + x)
            return jnp.cos(y @ w) * y, None

        loss = lambda ws, x: (jax.lax.scan(layer, x, ws)[0] ** 2).mean()
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))

    shapes = (8, 256, 256), (4096, 256)
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]

    def is_written_by_its_kernel():
        made = vmem_jax.jit(step, budget=0.95, donate_argnums=0).lower(*args)
        made = made.compile(target="h200")
        assert made.plan.fenced and made.plan.kept
        kernels = [text for text in made.as_text().split("\n}\n") if " tanh(" in text]
        return any(" dynamic-update-slice(" in text for text in kernels)

    assert is_written_by_its_kernel()
    monkeypatch.setattr(context, "with_written_stacks", lambda closed: closed)
    assert not is_written_by_its_kernel()
