"""Loops whose stacks XLA:GPU would begin as one array of zeros."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from built import needs_cuda
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import flatten
from vmem_jax.jax_compat import FENCE_OPTIONS
from vmem_jax.rewrite.own_stacks import with_own_stacks

LENGTH = 6


def recurrent(ws, x):
    """Gradient descent of two recurrent layers; x f32[LENGTH, n, width]."""

    def layer(w, x):
        def once(state, row):
            state = jnp.tanh(state @ w + row)
            return state, state

        return lax.scan(once, jnp.zeros_like(x[0]), x)[1]

    loss = lambda ws: jnp.mean(layer(ws[1], layer(ws[0], x)) ** 2)
    return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws), strict=True)]


def stacks(closed):
    """The shapes of the stacks of each scan of `closed`."""
    scans = [e for e in compat.open_jaxpr(closed).eqns if e.primitive.name == "scan"]
    return [{v.aval.shape for v in e.outvars[compat.scan_counts(e)[1] :]} for e in scans]


def twice(ws, x):
    """The same for halves of the samples, one after the other."""
    return lax.scan(lambda ws, x: (recurrent(ws, x), None), ws, jnp.stack(jnp.split(x, 2, 1)))[0]


def body_of(closed):
    """That of the first scan of `closed`."""
    scans = (e for e in compat.open_jaxpr(closed).eqns if e.primitive.name == "scan")
    return flatten(next(scans).params["jaxpr"])


@pytest.mark.parametrize("step", [recurrent, twice])
def test_no_two_loops_have_stacks_of_one_shape_and_the_results_are_the_same_to_the_bit(step):
    keys = jax.random.split(jax.random.key(0), 3)
    ws = [0.3 * jax.random.normal(key, (8, 8)) for key in keys[:2]]
    args = ws, jax.random.normal(keys[2], (LENGTH, 4, 8))
    flat = flatten(jax.make_jaxpr(step)(*args))
    own = with_own_stacks(flat)
    before, after = (stacks(body_of(c) if step is twice else c) for c in (flat, own))
    assert len(before) == len(after) == 4
    assert set.intersection(*before[:3]) and sum(map(len, after)) == len(set.union(*after))
    leaves = jax.tree.leaves(args)
    run = lambda closed: jax.jit(jaxpr_as_fun(closed))(*leaves)
    for ours, theirs in zip(run(own), run(flat), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert with_own_stacks(own) is own


def test_a_loop_with_effects_has_its_own_stacks_and_keeps_them():
    """A loop whose slices go through host memory has calls in its body."""
    seen = []

    def layer(w, x):
        def once(state, row):
            jax.debug.callback(lambda n: seen.append(n.shape), row)
            state = jnp.tanh(state @ w + row)
            return state, state

        return lax.scan(once, jnp.zeros_like(x[0]), x)[1]

    def step(ws, x):
        return layer(ws[1], layer(ws[0], x))

    args = [jnp.eye(8)] * 2, jnp.ones((LENGTH, 4, 8))
    flat = flatten(jax.make_jaxpr(step)(*args))
    own = with_own_stacks(flat)
    first, second = stacks(own)
    assert not first & second
    [result] = jax.jit(jaxpr_as_fun(own))(*jax.tree.leaves(args))
    jax.effects_barrier()
    assert seen == [(4, 8)] * 2 * LENGTH
    np.testing.assert_array_equal(result, jax.jit(step)(*args))


@pytest.mark.gpu_compile
def test_xla_fills_no_stack_of_several_loops():
    needs_cuda()
    assert FENCE_OPTIONS["gpu"]["xla_gpu_enable_dus_accumulator_zero_init_elimination"]
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    step = vmem_jax.jit(recurrent, budget="10GiB", donate_argnums=0)
    made = step.lower([struct(256, 256)] * 2, struct(64, 2048, 256)).compile(target="h200")
    text = made.as_text()
    assert made.plan.fenced and "AllocateBuffer" in text
    assert not re.search(r"f32\[64,(1,)*2048,256\]\S* (broadcast|fusion)\(\)", text)
