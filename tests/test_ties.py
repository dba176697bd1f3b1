"""Ties: what compares a value with what is computed from it is one step; gradients stay right."""

from __future__ import annotations

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import plan_of
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture, fuse
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.ties import COMPARISONS, ties
from vmem_jax.core.program import Phase
from vmem_jax.core.schedule import Do, schedule
from vmem_jax.core.validate import check_program, violations
from vmem_jax.rewrite import rewrite

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))

TIED = {
    "maximum": lambda y: y * y.max(-1, keepdims=True),
    "minimum": lambda y: y + y.min(0),
    "of a slice": lambda y: y + y[:, :4].max(),
    "transposed": lambda y: ((z := (y @ W).T) * z.max(0)).T,
    "median": lambda y: y * (y > jnp.median(y, -1, keepdims=True)),
    "top k": lambda y: jnp.where(y >= lax.top_k(y, 3)[0][:, -1:], y, 0),
    "running maximum": lambda y: jnp.where(y == lax.cummax(y, 1), y, 0),
    "bounds of itself": lambda y: jnp.where(y == jnp.clip(y, -y.mean(), y.mean()), y, 0),
}

FREE = {
    "a constant": lambda y: jnp.where(y > 0, y, 0.1 * y),
    "itself": lambda y: jnp.where(jnp.isnan(y), 0, y),
    "another value": lambda y: jnp.where(y > jnp.sin(X), y, 0),
    "a product of it": lambda y: jnp.where(y > y @ jnp.sin(W), y, 0),
    "of integers": lambda y: (
        y * jnp.where(y.astype(jnp.int32) == y.astype(jnp.int32).max(), 1.0, 2.0)
    ),
    "the larger of two": lambda y: jnp.maximum(y, y[::-1]),
    "softmax": lambda y: jax.nn.softmax(y),
    "the largest of several, in order": lambda y: largest_of_neighbours(y),
}


def largest_of_neighbours(y):
    """By order, as the index of a max-pool is found."""
    best, index = y[:, 0:6], jnp.zeros((4, 6), jnp.int32)
    for k in (1, 2):
        keep = best >= y[:, k : k + 6]
        best = jnp.where(keep, best, y[:, k : k + 6])
        index = jnp.where(keep, index, k)
    return y.at[:, :6].add(best * index)


def step_of(layer):
    def loss_of(w, x):
        return jnp.sin(layer(jnp.cos(x @ w)) @ w).sum()

    return lambda w, x: w - 0.1 * jax.grad(loss_of)(w, x)


def captured(step, *args):
    found = capture(jax.jit(step).trace(*args).jaxpr)
    assert check_program(found.program) == []
    return found


def names(found, step):
    eqns = compat.open_jaxpr(found.flat).eqns
    return {eqns[i].primitive.name for i in step.equations}


@pytest.mark.parametrize("name", TIED)
def test_a_comparison_with_itself_is_one_step(name):
    found = captured(step_of(TIED[name]), W, X)
    tied = [step for step in found.program.steps if step.tied]
    assert tied
    for step in tied:
        assert names(found, step) & COMPARISONS
        assert set(step.tied) <= set(step.reads)
    # no other step compares what these compare
    inside = {i for step in tied for i in step.equations}
    masks = {i for tie in ties(found.flat) for i in tie.equations}
    assert masks <= inside
    eqns = compat.open_jaxpr(found.flat).eqns
    for step in found.program.steps:
        if not step.tied:
            compared = {i for i in step.equations if eqns[i].primitive.name in COMPARISONS}
            assert compared.isdisjoint(masks)


@pytest.mark.parametrize("name", FREE)
def test_what_cannot_tie_is_left_alone(name):
    found = captured(step_of(FREE[name]), W, X)
    assert not any(step.tied for step in found.program.steps)


def test_a_heavy_kernel_between_two_results_leaves_the_comparison_alone():
    def layer(y):
        most = y.max(-1, keepdims=True)
        return jnp.where(y > most + jnp.broadcast_to(most, y.shape) @ jnp.sin(W), y, 0)

    flat = flatten(jax.jit(layer).trace(X @ W).jaxpr)
    assert ties(flat) == ()
    captured(step_of(layer), W, X)


def test_who_reads_a_result_before_all_operands_are_there_comes_later():
    """The maximum is read by a product before what the comparison reads besides is made."""

    def step(w, x):
        y = jnp.cos(x @ w)
        most = y.max(-1, keepdims=True)
        z = jnp.broadcast_to(most, y.shape) @ w
        other = jnp.sin(x) @ w
        return z, jnp.where(y == most + other - other, z, 0), other

    found = captured(step, W, X)
    assert any(step.tied for step in found.program.steps)
    run = jax.jit(lambda *args: rewrite_of(found, *args))
    for a, b in zip(run(W, X), jax.jit(step)(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def rewrite_of(found, *args):
    plan = plan_of(found.program, range(len(found.program.steps)))
    return jexc.jaxpr_as_fun(rewrite(found, plan))(*args)


def rounded_anew(closed, *args):
    """The results of `closed`, where each cosine is rounded otherwise than the last one was."""
    opened, env, runs = compat.open_jaxpr(closed), {}, 0
    env.update(zip(opened.invars, args, strict=True))
    read = lambda a: a.val if isinstance(a, jexc.Literal) else env[a]
    for eqn in opened.eqns:
        outs = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        if eqn.primitive.name == "cos":
            outs = [x * (1 + 1e-6 * runs) for x in outs]
            runs += 1
        env.update(zip(eqn.outvars, outs, strict=True))
    assert runs > 1, "the cosine is recomputed"
    return [read(a) for a in opened.outvars]


def recomputed(found, ops):
    """A plan in which the steps of the forward pass that `ops` names run once more, behind it."""
    steps = found.program.steps
    forward = [s for s, step in enumerate(steps) if step.phase is Phase.FORWARD]
    again = [s for s in forward if names(found, steps[s]) & ops]
    assert again
    rest = [s for s in range(len(steps)) if s not in forward]
    return plan_of(found.program, [*forward, *again, *rest])


@pytest.mark.parametrize("again", [{"cos"}, {"cos", "reduce_max"}, {"reduce_max", "cos", "mul"}])
def test_gradients_are_right_where_the_operand_is_rounded_anew(again):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(a.shape), jnp.float32) for a in (W, X))
    step = step_of(TIED["maximum"])
    found = captured(step, w, x)
    plan = recomputed(found, again)
    assert violations(found.program, plan) == []
    [got] = rounded_anew(rewrite(found, plan), w, x)
    np.testing.assert_allclose(got, step(w, x), atol=1e-4)


def test_meta_without_ties_they_are_not(monkeypatch):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(a.shape), jnp.float32) for a in (W, X))
    monkeypatch.setattr(fuse, "ties", lambda flat: ())
    step = step_of(TIED["maximum"])
    found = captured(step, w, x)
    [got] = rounded_anew(rewrite(found, recomputed(found, {"cos"})), w, x)
    assert np.abs(got - step(w, x)).max() > 0.01


def test_a_barrier_stands_in_front():
    found = captured(step_of(TIED["maximum"]), W, X)
    program = found.program
    [tie] = [s for s, step in enumerate(program.steps) if step.tied]
    events = schedule(program, range(len(program.steps)))
    at = [e.index if e.do is Do.RUN else -1 for e in events].index(tie)
    before = [e for e in events[:at] if e.position == events[at].position]
    assert any(e.do is Do.BARRIER and e.buffers == program.steps[tie].tied for e in before)
    plain = schedule(program, range(len(program.steps)), fenced=False)
    assert not any(e.do is Do.BARRIER for e in plain)
