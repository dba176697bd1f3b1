"""Updates of small parameters: which are one step, that XLA makes one kernel of it, the same bits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import unit_costs
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import Plan
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.batch import Batch, follow_batch
from vmem_jax.capture.layouts import Layout
from vmem_jax.capture.small_updates import LARGEST, as_apart
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import analytic
from vmem_jax.core.program import END, Phase
from vmem_jax.core.simulate import simulate
from vmem_jax.core.validate import violations
from vmem_jax.policy.order import canonical_order
from vmem_jax.profile.isolate import isolate
from vmem_jax.rewrite import rewrite
from vmem_jax.rewrite.column_sums import with_sums_in_parts

LAYERS, WIDTH = 24, 80
MACHINE = CARDS["h200"].machine


def training(optimizer, width=WIDTH, also=lambda params: ()):
    """A step with a large kernel and two small vectors in each layer, and its arguments."""

    def loss(params, x):
        for w, scale, bias in params:
            x = jnp.tanh(x @ w) * scale + bias
        return jnp.square(x).mean()

    def step(state, x):
        params, moments = state
        grads = jax.grad(loss)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        return (params, moments), also(params)

    def args():
        keys = jax.random.split(jax.random.key(0), LAYERS)
        kernel = lambda key: jax.random.normal(key, (width, width)) / width**0.5
        params = [(kernel(k), jnp.ones(width), jnp.zeros(width)) for k in keys]
        return (params, optimizer.init(params)), jnp.ones((512, width))

    return step, args


MOMENTUM, ADAM = optax.sgd(0.1, momentum=0.9), optax.adam(1e-3)


def captured(step, args, platform="gpu"):
    args = jax.eval_shape(args)
    leaves = len(jax.tree.leaves(args))
    donated = [i < len(jax.tree.leaves(args[0])) for i in range(leaves)]
    return capture(jax.jit(step).trace(*args).jaxpr, donated=donated, platform=platform)


def joined(program):
    return [step for step in program.steps if step.updates > 1]


@pytest.mark.parametrize(
    ("optimizer", "arrays"),
    [(optax.sgd(0.1), 3), (MOMENTUM, 5), (ADAM, 7)],
    ids=["sgd", "momentum", "adam"],
)
def test_updates_of_vectors_are_joined(optimizer, arrays):
    """As many as XLA's fusions may read and write arrays, with their moments."""
    program = captured(*training(optimizer)).program
    assert sum(step.updates for step in joined(program)) == 2 * LAYERS
    for step in joined(program):
        scalars = [b for b in step.reads if program.buffers[b].nbytes <= 4]
        assert len(step.reads) + len(step.writes) - len(scalars) == arrays * step.updates
        assert len(step.reads) + len(step.writes) <= 95 and step.phase is Phase.UPDATE
        assert step.fusible and step.pure
    largest = max(step.updates for step in joined(program))
    assert largest == min(2 * LAYERS, 95 // arrays)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("on a CPU", {"platform": "cpu"}),
        ("larger ones", {"width": LARGEST // 4 + 1}),
        ("norms of what is new", {"also": lambda params: optax.global_norm(params)}),
    ],
)
def test_others_are_not(case, options):
    platform = options.pop("platform", "gpu")
    assert not joined(captured(*training(MOMENTUM, **options), platform).program)


def test_an_average_of_parameters_is_made_with_them():
    average = lambda params: jax.tree.map(lambda p: 0.9 * p, params)
    program = captured(*training(MOMENTUM, also=average)).program
    assert sum(step.updates for step in joined(program)) == 2 * LAYERS
    assert all(len(step.writes) == 3 * step.updates for step in joined(program))


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_the_same_bits(optimizer):
    step, args = training(optimizer)
    found = captured(step, args)
    program, costs = found.program, unit_costs(found.program)
    order = canonical_order(program)
    timeline = simulate(program, order, costs)
    plan = Plan(program.fingerprint, "test", order, True, None, timeline.peak, timeline.seconds)
    assert violations(program, plan) == []
    ours = rewrite(found, plan)
    names = [eqn.primitive.name for eqn in compat.open_jaxpr(ours).eqns]
    own = [eqn.primitive.name for eqn in compat.open_jaxpr(found.flat).eqns]
    assert names.count("select_n") - own.count("select_n") == 2 * LAYERS
    leaves = jax.tree.leaves(args())
    with jax.disable_jit():
        expected = jaxpr_as_fun(with_sums_in_parts(found.flat))(*leaves)
        for x, y in zip(expected, jaxpr_as_fun(ours)(*leaves), strict=True):
            np.testing.assert_array_equal(x, y)


def test_plain_jit_launches_each():
    found = captured(*training(MOMENTUM))
    costs = analytic(found.program, MACHINE)
    apart = as_apart(costs, found.program, MACHINE)
    more = 2 * LAYERS - len(joined(found.program))
    assert sum(apart.seconds) - sum(costs.seconds) == pytest.approx(more * MACHINE.launch)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_xla_makes_one_kernel_of_each(optimizer):
    step, args = training(optimizer)
    run = vmem_jax.jit(step, budget="1GiB", policy="recompute", donate_argnums=0)
    text = run.lower(*jax.eval_shape(args)).compile(target="h200").as_text()
    entry = text[text.index("ENTRY") :].splitlines()
    loops = [line.split(" fusion(")[0] for line in entry if "kind=kLoop" in line]
    updates = [made for made in loops if f"f32[{WIDTH}]" in made and f",{WIDTH}]" not in made]
    assert len(updates) == len(joined(captured(step, args).program)) < LAYERS // 2


def test_they_are_not_timed_alone():
    """Without the array that all read, XLA would launch each by itself."""
    found = captured(*training(MOMENTUM))
    for s, step in enumerate(found.program.steps):
        if step.updates > 1:
            assert "several parameters" in isolate(found, [s], frozenset(), "gpu").trouble


def in_parts(step, args, count, platform="gpu"):
    """The step in so many sub-batches."""
    found = captured(step, args, platform)
    state, x = jax.eval_shape(args)
    layouts = [None] * len(jax.tree.leaves(state)) + [Layout(0)]
    batch = follow_batch(found.flat, layouts, x.shape[0])
    assert isinstance(batch, Batch), batch
    return found.in_sub_batches(batch, count)


def test_sums_of_sub_batches_are_joined():
    """Apart from the updates behind them, which read the same shapes."""
    step, args = training(MOMENTUM)
    program = in_parts(step, args, 4).program
    inside = [step for step in joined(program) if step.times > 1]
    assert sum(step.updates for step in inside) == 2 * LAYERS
    assert max(step.updates for step in inside) == 95 // 3
    assert sum(step.updates for step in joined(program) if step.times == 1) == 2 * LAYERS
    assert not [step for step in joined(in_parts(step, args, 4, "cpu").program) if step.times > 1]


def test_sub_batches_with_joined_sums_have_the_same_bits():
    """Those of the same sub-batches without a plan."""
    step, args = training(MOMENTUM)
    found = in_parts(step, args, 4)
    program, costs = found.program, unit_costs(found.program)
    order = canonical_order(program)
    timeline = simulate(program, order, costs)
    plan = Plan(program.fingerprint, "test", order, True, None, timeline.peak, timeline.seconds)
    unfenced = dataclasses.replace(plan, fenced=False)
    leaves = jax.tree.leaves(args())
    with jax.disable_jit():
        expected = jaxpr_as_fun(rewrite(found, unfenced))(*leaves)
        for x, y in zip(expected, jaxpr_as_fun(rewrite(found, plan))(*leaves), strict=True):
            np.testing.assert_array_equal(x, y)


def test_gradients_lie_as_their_weights():
    """No update behind the sub-batches transposes a total: the products make them so."""
    flat = compat.open_jaxpr(in_parts(*training(MOMENTUM), 4).flat)
    end = [eqn.primitive.name for eqn in flat.eqns].index(END)
    assert all(eqn.primitive.name != "transpose" for eqn in flat.eqns[end:])
    assert any(eqn.primitive.name == "transpose" for eqn in flat.eqns[:end])


@pytest.mark.gpu_compile
def test_xla_makes_one_kernel_of_the_sums_of_a_sub_batch():
    step, args = training(MOMENTUM)
    options = {"budget": "1GiB", "policy": "recompute", "sub_batches": 4, "donate_argnums": 0}
    lowered = vmem_jax.jit(step, **options).lower(*jax.eval_shape(args))
    text = lowered.compile(target="h200").as_text()
    sums = [line for line in text.splitlines() if " fusion(" in line and "while/body" in line]
    made = [line.split(" fusion(")[0] for line in sums if "kind=kLoop" in line]
    totals = [each for each in made if f"f32[{WIDTH}]" in each and f",{WIDTH}]" not in each]
    inside = [step for step in joined(in_parts(step, args, 4).program) if step.times > 1]
    assert len(totals) == len(inside) < LAYERS // 2
