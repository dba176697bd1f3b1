"""The forms of a step that are made for a budget: those that may fit, and have something to gain."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import vmem_jax
from vmem_jax.api.families import variant_of
from vmem_jax.api.planner import checked_log, find_plan
from vmem_jax.core.planned import predicted_need
from vmem_jax.policy.base import Infeasible
from vmem_jax.policy.residuals import Kept
from vmem_jax.search.attempt import Compiles
from vmem_jax.techniques import loops
from vmem_jax.techniques.logits import logit_chunks
from vmem_jax.techniques.loops import loop_contexts, loop_variants
from vmem_jax.techniques.sub_batches import least_in_parts, parts_of, whole_limits

LAYERS, WIDTH, TOKENS = 16, 256, 2048
shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)


def train_step(params, x, labels):
    def loss(params):
        def layer(x, given):
            a, b = given
            return x + jnp.tanh(jnp.sin(jax.nn.standardize(x) @ a) @ b), None

        y = lax.scan(layer, x, params["layers"])[0]
        return optax.softmax_cross_entropy_with_integer_labels(y @ params["head"], labels).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def context(vocabulary=16, times=1, **options):
    """A step `times` as wide, over so many times the tokens."""
    width, tokens = times * WIDTH, times * TOKENS
    layers = shape(LAYERS, width, 3 * width), shape(LAYERS, 3 * width, width)
    params = {"layers": layers, "head": shape(width, vocabulary)}
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    step = vmem_jax.jit(train_step, budget=2**62, donate_argnums=0, **options)
    return step.context((params, shape(tokens, width), labels), {}, "h200")


@pytest.mark.parametrize("every", [False, True])
def test_loops_whose_stacks_do_not_fit_are_made_only_if_asked_for(every, monkeypatch):
    step = context(times=2)  # kernels take more than what starts them, and stacks pay
    variants = loop_variants(step.traced, step.machine)
    budget = min(variant.need for variant in variants)
    largest = max(variant.kept.nbytes for variant in variants)
    made, new = [], loops._Variants._new
    spy = lambda self, kept: made.append(kept.nbytes) or new(self, kept)
    monkeypatch.setattr(loops._Variants, "_new", spy)
    forms = loop_contexts(step, budget, every)
    assert (largest in made) == every
    needs = [_need(form) for form in forms]
    assert min(needs) <= budget and (max(needs) > 2 * budget) == every


@pytest.mark.parametrize(("share", "alone"), [(0.9, True), (0.99, False)])
def test_no_smaller_stacks_are_made_beside_those_that_are_likely_to_fit(share, alone, monkeypatch):
    step = context(times=2)
    largest = max(loop_variants(step.traced, step.machine), key=lambda v: v.kept.nbytes)
    made, new = [], loops._Variants._new
    spy = lambda self, kept: made.append(kept.nbytes) or new(self, kept)
    monkeypatch.setattr(loops._Variants, "_new", spy)
    params = dataclasses.replace(loops.PARAMS, stacks_off=0.0)
    monkeypatch.setattr(loops, "PARAMS", params)
    loop_contexts(step, int(largest.need / share))
    assert largest.kept.nbytes in made and (len(made) == 1) == alone


@pytest.mark.parametrize("excess", [0, -1])
def test_stacks_that_fit_in_sub_batches_are_made(excess):
    step = context(times=2)
    fastest = min(loop_variants(step.traced, step.machine), key=lambda variant: variant.seconds)
    budget, limit = int(0.8 * fastest.need), fastest.need + excess
    needs = [_need(form) for form in loop_contexts(step, budget, limits=[limit])]
    assert (fastest.need in needs) == (limit >= fastest.need)
    assert {*needs} >= {_need(form) for form in loop_contexts(step, budget)}


def test_smaller_stacks_are_made_while_they_are_faster(monkeypatch):
    """Behind those that are likely to fit; not those that are expected to take far longer."""
    step = context()
    variants = loops._Variants(step.traced, step.machine)
    kepts = [Kept((), 100 - n, seconds) for n, seconds in enumerate((1.0, 1.1, 1.2, 1.3, 2.0))]
    variants.front = kepts
    made = dict(zip(kepts, (9.0, 8.0, 7.0, 7.5, 1.0), strict=True))
    new = lambda kept: loops.LoopVariant(step.traced, kept, 50, made[kept], False)
    monkeypatch.setattr(variants, "of", new)
    assert [each.seconds for each in variants.some(2**40)] == [9.0, 8.0, 7.0]
    made[kepts[3]] = 6.0
    assert [each.seconds for each in variants.some(2**40)] == [9.0, 8.0, 7.0, 6.0]
    assert [each.seconds for each in variants.some(None)] == [9.0, 8.0, 7.0, 6.0, 1.0]


def test_a_step_without_loops_has_no_forms_with_other_stacks():
    def unrolled(w, x):
        return jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum())(w)

    step = vmem_jax.jit(unrolled, budget=2**62).context((shape(64, 64), shape(8, 64)), {}, "h200")
    assert parts_of(step).counts != (1,)
    assert loop_contexts(step, 2**62, limits=whole_limits(step, 2**62)) == []


@pytest.mark.parametrize("count", [2, 4])
def test_what_needs_a_limit_as_a_whole_fits_in_so_many_sub_batches(count):
    step = context(times=2)
    fastest = min(loop_variants(step.traced, step.machine), key=lambda variant: variant.seconds)
    [form] = [f for f in loop_contexts(step, 2**62) if _need(f) == fastest.need]
    in_parts = variant_of(form, step.settings.policy, count)
    plan = in_parts.policy.plan(in_parts.program, in_parts.costs, None)
    need = predicted_need(in_parts.program, plan)
    of_whole = dict(zip(parts_of(step).counts[1:], whole_limits(step, need), strict=True))
    assert fastest.need < of_whole[count] < 1.2 * fastest.need


@pytest.mark.parametrize("vocabulary, chunked", [(2**10, False), (2**16, True)])
def test_logits_are_chunked_where_the_step_peaks_there(vocabulary, chunked):
    step = context(vocabulary)
    budget = int(0.4 * _need(step))
    assert logit_chunks(step, budget)
    log = checked_log(step)
    find_plan(step, budget, log, compiles=Compiles.NONE)
    assert any("chunks" in str(line) for line in log.lines) == chunked


def _need(step):
    """Bytes that `step` is predicted to need without a budget."""
    variant = variant_of(step, step.settings.policy, 1)
    plan = variant.policy.plan(variant.program, variant.costs, None)
    return predicted_need(variant.program, plan)


def momentum(state, x):
    w, m = state
    m = 0.9 * m + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * m, m


def gradients(state, x):
    return jax.grad(lambda state: jnp.mean(jnp.tanh(x @ state[0] @ state[1]) ** 2))(state)


@pytest.mark.parametrize("step", [momentum, gradients])
@pytest.mark.parametrize("count", [2, 4])
def test_the_least_of_sub_batches_is_a_bound(step, count):
    made = vmem_jax.jit(step, budget=2**62, sub_batches=count, donate_argnums=0, batch_argnums=1)
    weights = shape(WIDTH, WIDTH), shape(WIDTH, WIDTH)
    assert 0 < _checked(made.context((weights, shape(TOKENS, WIDTH)), {}, "h200"), count)


@pytest.mark.parametrize("count", [2, 4])
def test_the_least_of_sub_batches_counts_gradients_and_samples(count):
    step = context(sub_batches=count)
    gradients = 4 * (6 * LAYERS * WIDTH**2 + 16 * WIDTH)
    arguments = step.traced.captured.program.arguments_nbytes
    assert _checked(step, count) >= arguments + gradients
    assert least_in_parts(step, 1) == 0
    # a kernel reads or writes what a layer makes of a sub-batch, in float32
    more = 4 * TOKENS * WIDTH
    assert least_in_parts(step, count) >= arguments + gradients + more // count
    assert least_in_parts(step, -2) < least_in_parts(step, -4)


def _checked(step, count):
    """The least of `step` in so many sub-batches, which no plan is below."""
    least = least_in_parts(step, count)
    variant = variant_of(step, step.settings.policy, count)
    found = variant.policy.plan(variant.program, variant.costs, 1)
    assert isinstance(found, Infeasible) and least <= found.minimum_peak
    return least
