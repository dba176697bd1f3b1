"""Pairs of scans in the bodies of other scans: gradients that are summed over micro-batches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAST
from jax import lax
from test_loop_residuals import MACHINE, assert_near, captured_of, run, temporaries

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture.capture import capture_pair
from vmem_jax.capture.loop_levels import Stacking, levels
from vmem_jax.capture.loop_segments import segmented
from vmem_jax.capture.shards import Shards
from vmem_jax.policy.residuals import choose
from vmem_jax.policy.segment_lengths import divisions

LAYERS, WIDTH = 8, 16


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.3, shape), jnp.float32)


def layer(x, w):
    return x + jnp.tanh(jnp.tanh(x @ w) @ w), None


def one_stack(w, x):
    return jnp.square(lax.scan(layer, x, w)[0]).mean()


def two_stacks(w, x):
    """An encoder and a decoder."""
    x, _ = lax.scan(layer, x, w)
    return jnp.square(lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w[::-1])[0]).mean()


def accumulating(loss=one_stack, unroll=1):
    """A step over micro-batches: (weights, xs[n, rows, width]) -> new weights, loss."""

    def step(w, xs):
        def micro(sums, x):
            value, grad = jax.value_and_grad(loss)(w, x)
            return (sums[0] + value, sums[1] + grad), value

        sums, values = lax.scan(micro, (jnp.float32(0), jnp.zeros_like(w)), xs, unroll=unroll)
        return w - 0.1 * sums[1] / xs.shape[0], sums[0], values

    return step, (normal(1, LAYERS, WIDTH, WIDTH), normal(2, 3, 64, WIDTH))


def accumulating_twice():
    """Micro-batches of micro-batches."""
    inner, (w, xs) = accumulating()

    def step(w, groups):
        def group(total, xs):
            new, value, _ = inner(w, xs)
            return total + new - w, value

        total, values = lax.scan(group, jnp.zeros_like(w), groups)
        return w + total, values

    return step, (w, jnp.stack([xs, 0.5 * xs]))


STEPS = {
    "one_stack": accumulating,
    "two_stacks": lambda: accumulating(two_stacks),
    "unrolled": lambda: accumulating(unroll=3),
    "twice": accumulating_twice,
}


class Levels:
    def __init__(self, step, args):
        self.args = args
        self.closed, captured = captured_of(step, args)
        self.level = levels(captured.separate, Shards())
        made = [capture_pair(pair) for pair, _ in self.level.all_pairs]
        self.loops = [loop for loop, _ in made]
        self.variables = [variables for _, variables in made]

    def by(self, kept):
        each = zip(self.variables, kept.buffers, kept.every, kept.parts, strict=True)
        stackings = (
            Stacking([vs[b] for b in sorted(own)], every, [vs[b] for b in part])
            for vs, own, every, part in each
        )
        again = segmented(*self.level.again(stackings))
        compat.check_jaxpr(again)
        return again


def test_pairs_are_found_in_the_bodies_of_other_scans():
    assert len(Levels(*accumulating()).level.all_pairs) == 1
    assert len(Levels(*accumulating(two_stacks)).level.all_pairs) == 2
    [(pair, level)] = Levels(*accumulating_twice()).level.all_pairs
    assert pair.length == LAYERS
    assert level.times == 2 * 3


@pytest.mark.parametrize("name", STEPS)
def test_every_choice_gives_the_same_results(name):
    made = Levels(*STEPS[name]())
    expected = run(made.closed, made.args)
    for every in (((),) * len(made.loops), divisions(made.loops)[-1], ((4, 2),) * len(made.loops)):
        kept = choose(made.loops, MACHINE, fewest=True, every=every)
        assert_near(run(made.by(kept), made.args), expected)


def test_fewer_stacks_in_the_body_need_less_memory():
    step, (w, xs) = accumulating()
    made = Levels(step, (w, jnp.tile(xs, (1, 8, 1))))
    fewest = choose(made.loops, MACHINE, fewest=True)
    divided = choose(made.loops, MACHINE, fewest=True, every=divisions(made.loops)[0])
    needs = [temporaries(made.closed, made.args)]
    needs += [temporaries(made.by(kept), made.args) for kept in (fewest, divided)]
    assert needs == sorted(needs, reverse=True)
    assert needs[1] < 0.6 * needs[0]
    assert needs[2] < 0.9 * needs[1]


def test_gradients_of_a_micro_batch_never_exist_beside_their_sums():
    """So the step needs the weights, their new values and no third stack of them."""

    def step(w, xs):
        def micro(sums, x):
            return sums + jax.grad(one_stack)(w, x), None

        return lax.scan(micro, jnp.zeros_like(w), xs)[0]

    args = normal(1, 64, 64, 64), normal(2, 3, 8, 64)
    made = Levels(step, args)
    kept = choose(made.loops, MACHINE, fewest=True)
    needs = [temporaries(closed, args) for closed in (made.closed, made.by(kept))]
    assert needs[1] <= needs[0] - 0.9 * args[0].nbytes


@pytest.mark.parametrize("name", ["one_stack", "two_stacks"])
def test_a_step_that_accumulates_gradients_is_planned(name, tmp_path):
    step, (w, xs) = STEPS[name]()
    args = w, jnp.tile(xs, (1, 16, 1))
    budgeted = vmem_jax.jit(step, budget=0.55, machine=FAST, sub_batches=1)
    plan = budgeted.plan(*args)
    assert plan.kept is not None
    assert_near(jax.tree.leaves(budgeted(*args)), jax.tree.leaves(jax.jit(step)(*args)))
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=vmem_jax.Plan.load(tmp_path / "plan.json"))
    assert again.plan(*args).kept == plan.kept


def test_what_a_loop_in_a_body_recomputes_counts_for_each_micro_batch():
    step, (w, xs) = accumulating()

    def chosen(xs):
        level = Levels(step, (w, xs)).level
        loops = [
            dataclasses.replace(capture_pair(pair)[0], times=each.times)
            for pair, each in level.all_pairs
        ]
        return choose(loops, MACHINE, fewest=True)

    few, many = chosen(xs), chosen(jnp.tile(xs, (4, 1, 1)))
    assert many.seconds == pytest.approx(4 * few.seconds)
    assert many.nbytes == few.nbytes
