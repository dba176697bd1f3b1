"""Planning a scanned network: what it looks at does not grow with the number of layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import vmem_jax
from vmem_jax.api.planner import checked_log, find_plan
from vmem_jax.core.planned import predicted_need
from vmem_jax.policy import Keep
from vmem_jax.policy.auto import Auto
from vmem_jax.policy.residuals import choose
from vmem_jax.search.search import Compiles
from vmem_jax.techniques.loops import _Variants, loop_variants

N, D = 4096, 128


def train_step(params, x):
    def loss(params):
        def layer(x, given):
            a, b = given
            x = x + jnp.sin(jax.nn.standardize(x) @ a) @ b
            return x + jnp.tanh(jax.nn.standardize(x)), None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def looked_at(layers, share, monkeypatch):
    """(Steps of each program that is planned, whether a plan fits) within `share` of all kept."""
    sizes, plan = [], Auto.plan

    def planned(self, program, *args):
        sizes.append(len(program.steps))
        return plan(self, program, *args)

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    args = (shape(layers, D, 4 * D), shape(layers, 4 * D, D)), shape(N, D)
    step = vmem_jax.jit(train_step, budget=2**62, donate_argnums=0).context(args, {}, "h200")
    program = step.traced.captured.program
    whole = predicted_need(program, Keep().plan(program, step.costs, None))
    with monkeypatch.context() as patch:
        patch.setattr(Auto, "plan", planned)
        found = find_plan(step, int(share * whole), checked_log(step), compiles=Compiles.NONE)
    return sizes, found.fits


@pytest.mark.parametrize("share", [0.5, 0.33])
def test_many_layers_are_planned_like_few(share, monkeypatch):
    few, fits = looked_at(16, share, monkeypatch)
    many, more_fits = looked_at(128, share, monkeypatch)
    assert fits and more_fits
    assert 0 < len(many) <= len(few) + 1
    assert max(many) <= max(few) < 16  # steps of a program do not grow with the layers


@pytest.mark.parametrize("activation, forms", [(lambda x: x, 0), (jnp.tanh, 2)])
def test_the_stacks_of_a_steps_own_loops_are_not_chosen_once_more(activation, forms):
    """A linear layer's gradient needs what the layer reads, which JAX stacks and nothing else."""

    def train_step(w, x):
        layer = lambda x, w: (activation(x @ w), None)
        return w - 0.1 * jax.grad(lambda w: jnp.mean(lax.scan(layer, x, w)[0] ** 2))(w)

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    step = vmem_jax.jit(train_step, budget=2**62)
    context = step.context((shape(8, 64, 64), shape(1024, 64)), {}, "h200")
    assert len(loop_variants(context.traced, context.machine)) == forms


@pytest.mark.parametrize("beside, levels", [(0, 3), (2**8, 2), (2**12, 1)])
def test_a_further_level_of_segments_is_taken_where_it_needs_noticeably_less(beside, levels):
    """128 carry-ins of 256 KiB, beside an argument of so many of them."""

    def train_step(w, x, others):
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        new = w - 0.1 * jax.grad(lambda w: jnp.mean(lax.scan(layer, x, w)[0] ** 2))(w)
        return new, others + 1

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    args = shape(128, 64, 64), shape(1024, 64), shape(beside, 1024, 64)
    step = vmem_jax.jit(train_step, budget=1, donate_argnums=(0, 2))
    context = step.context(args, {}, "h200")
    variants = loop_variants(context.traced, context.machine, budget=1)
    assert max(len(every) for variant in variants for every in variant.kept.every) == levels


def gated_step(w, xs):
    """A recurrent cell with gates, over `xs`: it stacks many small values."""

    def cell(w, state, x):
        h, c = state
        a, b, d, e = jnp.split(jnp.concatenate([h, x], axis=1) @ w, 4, axis=1)
        c = jax.nn.sigmoid(a) * c + jax.nn.sigmoid(b) * jnp.tanh(d)
        h = jax.nn.sigmoid(e) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros(xs.shape[1:])
    scanned = lambda w: lax.scan(functools.partial(cell, w), (zeros, zeros), xs)[1]
    loss = lambda w: jnp.square(scanned(w)).mean()
    return w - 0.1 * jax.grad(loss)(w)


@pytest.mark.parametrize("every, shares", [((), (5.5, 6.5)), ((16,), (1.2, 1.8))])
def test_stacks_of_a_loop_of_small_kernels_are_predicted_to_take_what_they_do(every, shares):
    """Each kernel takes a launch and little else, those that write stacks, too. Which kernels are
    merged, and which slices one of them reads, is known in the forms alone."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    step = vmem_jax.jit(gated_step, budget=2**62, donate_argnums=0)
    context = step.context((shape(256, 512), shape(128, 32, 128)), {}, "h200")
    variants = _Variants(context.traced, context.machine)
    value = 128 * 32 * 128 * 4
    limits = [int(share * value) for share in shares]
    some = [choose(variants.loops, context.machine, limit, every=(every,)) for limit in limits]
    assert all(kept.every == (every,) for kept in some)
    found = [variants.of(kept) for kept in (*variants.front, *some)]
    beside = [variant.seconds - variant.kept.seconds for variant in found]
    seconds = [variant.seconds for variant in found]
    assert max(beside) - min(beside) < 0.125 * min(seconds)
