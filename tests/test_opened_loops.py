"""Loops of training steps, planned inside: which are opened, their values, plans that fit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import BudgetError, Plan
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.opened_loops import buried, opened
from vmem_jax.core.need import need_nbytes
from vmem_jax.core.plan import keep_plan
from vmem_jax.core.program import BEGIN
from vmem_jax.rewrite import rewrite

LAYERS, WIDTH, SAMPLES, COUNT = 6, 64, 512, 4


def loss(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w) * jax.nn.sigmoid(x) + b
    return jnp.square(x).mean()


def accumulated(params, xs, **options):
    """Gradients added over micro-batches."""

    def once(total, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(jnp.add, total, grads), value

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, values = lax.scan(once, zeros, xs, **options)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, total), values


def repeated(params, xs):
    """Several steps in one call."""

    def once(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return lax.scan(once, params, xs)


def by_index(params, xs):
    """Of samples that are made before, by a loop over numbers, which carries what it only reads."""
    xs = jnp.sin(xs)

    def once(i, carry):
        total, xs, scale = carry
        grads = jax.grad(loss)(params, scale * lax.dynamic_index_in_dim(xs, i, keepdims=False))
        return jax.tree.map(jnp.add, total, grads), xs, scale

    zeros = jax.tree.map(jnp.zeros_like, params)
    return lax.fori_loop(0, COUNT, once, (zeros, xs, jnp.float32(2)))[0]


def with_inputs(params, xs):
    """With the gradients to the samples, which it stacks, and what is the same in every iteration."""

    def once(total, x):
        grads, to_x = jax.grad(loss, (0, 1))(params, x)
        return jax.tree.map(jnp.add, total, grads), (to_x, jnp.float32(1))

    return lax.scan(once, jax.tree.map(jnp.zeros_like, params), xs)


def scanned_layers(params, xs):
    """The layers are a scan in the body: a pair of loops in the loop."""
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *params)

    def deep(stacked, x):
        layer = lambda x, p: (jnp.tanh(x @ p[0]) + p[1], None)
        return jnp.square(lax.scan(layer, x, stacked)[0]).mean()

    def once(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(deep)(stacked, x)), None

    return lax.scan(once, jax.tree.map(jnp.zeros_like, stacked), xs)[0]


OPENED = {
    "accumulated": accumulated,
    "reversed": lambda params, xs: accumulated(params, xs, reverse=True),
    "unrolled by two": lambda params, xs: accumulated(params, xs, unroll=2),
    "repeated": repeated,
    "by index": by_index,
    "with inputs": with_inputs,
    "scanned layers": scanned_layers,
}


def args():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [(jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, jnp.ones(WIDTH)) for k in keys]
    return params, jax.random.normal(jax.random.key(1), (COUNT, SAMPLES, WIDTH))


def captured(step, platform="", given=args):
    return capture(jax.jit(step).trace(*jax.eval_shape(given)).jaxpr, platform=platform)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", OPENED)
def test_what_is_opened_computes_the_same(name, platform):
    found = opened(captured(OPENED[name], platform))
    assert found is not None and found.program.opened and found.program.sub_batches == COUNT
    compat.check_jaxpr(found.flat)
    rewritten = rewrite(found, keep_plan(found.program, None, 0, 0.0))
    compat.check_jaxpr(rewritten)
    [scan] = [e for e in compat.open_jaxpr(rewritten).eqns if e.primitive.name == "scan"]
    assert scan.params["unroll"] == (2 if name == "unrolled by two" else 1)
    expected = jax.jit(OPENED[name])(*args())
    got = jax.jit(jaxpr_as_fun(rewritten))(*jax.tree.leaves(args()))
    for a, b in zip(jax.tree.leaves(expected), got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_are_added_to_totals_where_they_are_made():
    """Not at the end of the iteration, as the user adds them."""
    program = opened(captured(accumulated, "gpu")).program
    [begin] = (step for step in program.steps if step.op == BEGIN)
    adds = [s for s, step in enumerate(program.steps) if step.op == "dot_general"]
    adds = [s for s in adds if set(begin.writes) & {*program.steps[s].reads}]
    assert len(adds) == LAYERS and adds[-1] - adds[0] > 3 * LAYERS


@pytest.mark.parametrize("name", OPENED)
def test_plans_inside_fit_where_plain_does_not(name):
    step = OPENED[name]
    plain = jax.jit(step, donate_argnums=0).lower(*args()).compile()
    share = {"with inputs": 0.8, "scanned layers": 0.85}.get(name, 0.65)
    budget = int(share * need_nbytes(plain))
    made = vmem_jax.jit(step, budget=budget, donate_argnums=0).lower(*args()).compile()
    assert made.plan.opened and need_nbytes(made) <= budget
    expected = jax.jit(step)(*args())
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(made(*args())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_saved_plan_runs_and_says_what_it_does():
    budgeted = vmem_jax.jit(accumulated, budget=0.6)
    plan = budgeted.plan(*args())
    assert plan.opened and "4 iterations planned inside" in str(plan)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    made = vmem_jax.jit(accumulated, plan=again).lower(*args()).compile()
    assert made.plan == plan and need_nbytes(made) <= plan.budget
    assert "a loop of 4 iterations is planned inside" in str(budgeted.explain(*args()))


def evaluated(params, xs):
    return lax.map(lambda x: loss(params, x), xs)


@pytest.mark.parametrize("step", [evaluated, lambda p, xs: loss(p, xs[0])])
def test_others_are_not(step):
    assert opened(captured(step)) is None


def epochs(params, xs, step=accumulated):
    return lax.scan(lambda params, _: step(params, xs), params, length=2)


def test_steps_in_a_loop_of_loops_are_named_and_can_be_planned_by_themselves():
    line = accumulated.__code__.co_firstlineno + 8
    with pytest.raises(BudgetError, match=rf"in the loop at test_opened_loops.py:{line} are not"):
        vmem_jax.jit(epochs, budget=0.8).lower(*args()).compile()
    advised = functools.partial(epochs, step=vmem_jax.jit(accumulated, budget=0.7))
    assert "optimization_barrier" in str(jax.make_jaxpr(advised)(*args()))  # the fences of a plan
    both = (jax.tree.leaves(jax.jit(step)(*args())) for step in (epochs, advised))
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [accumulated, evaluated, lambda p, xs: loss(p, xs[0])])
def test_no_step_lies_in_a_loop_of_loops(step):
    assert buried(captured(step)) is None


@pytest.mark.parametrize("policy", ["auto", "exact", "recompute"])
def test_policies_plan_inside(policy):
    allow = ("order",) if policy == "auto" else None
    plan = vmem_jax.jit(accumulated, budget=0.85, policy=policy, allow=allow).plan(*args())
    assert plan.opened and (policy == "recompute" or not plan.recomputed)


def test_published_systems_do_not():
    with pytest.raises(vmem_jax.BudgetError):
        vmem_jax.jit(accumulated, budget=0.85, policy="superneurons").plan(*args())


@pytest.mark.gpu_compile
def test_accumulation_fits_on_a_gpu_where_plain_does_not():
    given = jax.eval_shape(args)
    jit = lambda **options: vmem_jax.jit(accumulated, donate_argnums=0, **options)
    plain = jit(budget="1GiB", policy="keep").lower(*given).compile(target="h200")
    made = jit(budget=0.6).lower(*given).compile(target="h200")
    assert made.plan.opened and need_nbytes(made) <= 0.6 * need_nbytes(plain)


def test_a_closed_loop_takes_what_plain_jit_takes():
    """XLA spreads the layout of the one token that is read, unless the loop is opened and says so."""

    def deep(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return jnp.square(x[:, 0] @ ws[0]).mean()

    def step(ws, xs):
        add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(deep)(ws, x)), None)
        return lax.scan(add, jax.tree.map(jnp.zeros_like, ws), xs)[0]

    given = [jax.ShapeDtypeStruct((512, 512), "bfloat16")] * 4
    samples = jax.ShapeDtypeStruct((4, 64, 256, 512), "bfloat16")
    context = vmem_jax.jit(step, budget="8GiB").context((given, samples), {}, "h200")
    assert context.opened is not None
    seconds = lambda costs: sum(costs.seconds)
    assert seconds(context.costs) == pytest.approx(seconds(context.plain_costs))
    assert seconds(context.costs) > 1.1 * seconds(context.opened.costs)
