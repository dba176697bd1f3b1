"""Loops that stack equal values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from built import needs_cuda
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture.equal_stacks import with_equal_stacks_merged
from vmem_jax.capture.flatten import flatten

GATES, LENGTH = 4, 5


def weights(width):
    keys = iter(jax.random.split(jax.random.key(0), GATES))
    return [0.3 * jax.random.normal(next(keys), (width, width)) for _ in range(GATES)]


def layer(ws, x):
    """A recurrent layer each of whose gates casts the state for itself; x f32[length, n, width]."""

    def once(state, row):
        add = jax.jit(lambda w: row + (state.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)))
        one, two, *others = (jnp.tanh(add(w)) for w in ws)
        state = one * two + sum(others)
        return state, state

    return lax.scan(once, jnp.zeros_like(x[0]), x)[1]


def step(ws, x):
    """One of gradient descent."""
    value, grads = jax.value_and_grad(lambda ws: jnp.mean(layer(ws, x) ** 2))(ws)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value


def twice(ws, x):
    """The same for halves of the samples, one after the other."""
    return lax.scan(lambda ws, x: step(ws, x), ws, jnp.stack(jnp.split(x, 2, 1)))


def scans(closed):
    return [e for e in compat.open_jaxpr(closed).eqns if e.primitive.name == "scan"]


def halves(closed):
    """The number of stacks in half precision that the first loop of `closed` makes, and that the one
    behind it reads."""
    forward, backward = scans(closed)
    is_half = lambda a: a.aval.dtype == jnp.bfloat16 and a.aval.shape[0] == LENGTH
    return sum(map(is_half, forward.outvars)), sum(map(is_half, backward.invars))


@pytest.mark.parametrize("fun", [step, twice])
def test_what_gates_cast_alike_is_stacked_and_read_once(fun):
    args = weights(8), jax.random.normal(jax.random.key(1), (LENGTH, 4, 8))
    flat = flatten(jax.make_jaxpr(fun)(*args))
    merged = with_equal_stacks_merged(flat)
    compat.check_jaxpr(merged)
    body = lambda closed: closed if fun is step else flatten(scans(closed)[0].params["jaxpr"])
    assert halves(body(flat)) == (GATES, GATES)
    assert halves(body(merged)) == (1, 1)
    assert with_equal_stacks_merged(merged) is merged
    leaves = jax.tree.leaves(args)
    run = lambda closed: jax.jit(jaxpr_as_fun(closed))(*leaves)
    for ours, theirs in zip(run(merged), run(flat), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_results_stay_and_what_equals_one_is_read_there():
    """Each result has memory of its own."""

    def fun(x):
        once = lambda _, row: (None, [jnp.sin(row) for _ in range(4)])
        _, (one, two, three, four) = lax.scan(once, None, x)
        read = lambda state, rows: (state + rows[0] * rows[1], None)
        return two, four, lax.scan(read, x[0], (one, three))[0]

    flat = flatten(jax.make_jaxpr(fun)(jnp.ones((LENGTH, 8))))
    merged = with_equal_stacks_merged(flat)
    opened = compat.open_jaxpr(merged)
    first, last = scans(merged)
    assert opened.outvars == compat.open_jaxpr(flat).outvars
    assert first.outvars == opened.outvars[:2] and len(scans(flat)[0].outvars) == 4
    assert len(last.invars) == 2 and last.invars[1] is opened.outvars[0]


def test_what_differs_and_a_loop_with_effects_stay():
    def fun(x, shown):
        def once(state, row):
            if shown:
                jax.debug.callback(lambda n: None, row)
            other = jnp.sin(row) if shown else jnp.cos(row)
            return state, (jnp.sin(row), other)

        return [y.sum() for y in lax.scan(once, x[0], x)[1]]

    for shown in (False, True):
        flat = flatten(jax.make_jaxpr(lambda x, shown=shown: fun(x, shown))(jnp.ones((LENGTH, 8))))
        assert with_equal_stacks_merged(flat) is flat


@pytest.mark.gpu_compile
def test_the_need_of_a_described_card_has_equal_stacks_once():
    """Of 4 half-precision stacks XLA has one. With all of them it would need half as much again."""
    needs_cuda()
    ws = jax.eval_shape(lambda: weights(512))
    x = jax.ShapeDtypeStruct((256, 64, 512), jnp.float32)
    step_ = vmem_jax.jit(step, policy="exact", budget="100GiB", donate_argnums=0)
    made = step_.lower(ws, x).compile(target="h200")
    assert made.attempts[-1].predicted_need == pytest.approx(made.need_nbytes, rel=0.03)
