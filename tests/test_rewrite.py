"""rewrite: an identity plan changes nothing; every other one computes the same bits, op by op."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import unit_costs
from jax.extend.core import jaxpr_as_fun
from steps import CASES

from vmem_jax import Plan
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.core.fences import fences
from vmem_jax.core.plan import keep_plan
from vmem_jax.core.simulate import simulate
from vmem_jax.core.validate import check_program, violations
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.order import canonical_order
from vmem_jax.rewrite import rewrite
from vmem_jax.rewrite.column_sums import with_sums_in_parts

DEPTH = 6


def step(params, x):
    def loss_of(params):
        y = x
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                y = jnp.tanh(y @ w) * y
        return jnp.square(y).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments():
    keys = jax.random.split(jax.random.key(0), DEPTH)
    return [jax.random.normal(k, (16, 16)) / 4 for k in keys], jnp.ones((64, 16)) / 3


def captured(fun=step, args=None, donate=False, platform=""):
    args = args or arguments()
    closed = jax.jit(lambda *a: fun(*a)).trace(*args).jaxpr
    state = len(jax.tree.leaves(args[0]))
    leaves = len(jax.tree.leaves(args))
    donated = [donate and i < state for i in range(leaves)]
    return capture(closed, donated=donated, platform=platform), closed


def plan_under(found, share, base=None):
    """A plan whose executor had `share` of the memory between the least and the traced peak."""
    program, costs = found.program, unit_costs(found.program)
    base = canonical_order(program) if base is None else base
    low = program.resident_nbytes
    limit = int(low + share * (simulate(program, base, costs).peak - low))
    order = tuple(Execution(program, costs, base, limit=limit).order)
    timeline = simulate(program, order, costs)
    plan = Plan(program.fingerprint, "test", order, True, None, timeline.peak, timeline.seconds)
    assert violations(program, plan) == []
    return plan


def counted(jaxpr):
    return collections.Counter(e.primitive.name for e in compat.open_jaxpr(jaxpr).eqns)


def test_identity_plan_is_the_flat_jaxpr_itself():
    found, closed = captured()
    plan = keep_plan(found.program, None, 0, 0.0)
    assert rewrite(found, plan) is found.flat
    assert counted(found.flat)["dot_general"] == counted_flat(closed)["dot_general"]


def counted_flat(closed):
    from vmem_jax.capture.flatten import flatten

    return counted(flatten(closed))


def test_traced_order_without_fences_has_the_same_equations():
    found, _ = captured()
    program = found.program
    moved = tuple(range(len(program.steps)))
    plan = Plan(program.fingerprint, "test", moved, True, None, 0, 0.0)
    result = rewrite(found, plan)
    compat.check_jaxpr(result)
    with_fences, plain = counted(result), counted(found.flat)
    assert with_fences.pop("optimization_barrier") == len(fences(program, moved))
    # cheap equations may be computed inside of several steps, as fusions do
    assert all(with_fences[name] >= n for name, n in plain.items())
    for heavy in ("dot_general", "reduce_sum"):
        assert with_fences[heavy] == plain[heavy]


def test_a_barrier_stands_between_a_librarys_clamp_and_its_mask():
    """XLA would take `max(x, 0) > 0` for `x > 0`, and have the library return x."""

    def clamped(w, x):
        def loss_of(w):
            y = jax.nn.relu(x @ w + 1)
            return jnp.where(y > 0, jnp.sin(y), 0).sum() + (y[:2] * 3).sum()

        return jax.grad(loss_of)(w)

    found, _ = captured(clamped, (jnp.ones((16, 16)), jnp.ones((64, 16))))
    steps = found.program.steps
    assert sum(step.epilogue_nbytes > 0 for step in steps) == 1
    order = tuple(range(len(steps)))
    plan = Plan(found.program.fingerprint, "test", order, True, None, 0, 0.0)
    eqns = compat.open_jaxpr(rewrite(found, plan)).eqns
    maker = {v: eqn.primitive.name for eqn in eqns for v in eqn.outvars}
    masks = [eqn for eqn in eqns if eqn.primitive.name == "gt"]
    assert masks and {maker[eqn.invars[0]] for eqn in masks} == {"optimization_barrier"}


@pytest.mark.parametrize("share", [0.7, 0.5, 0.35])
def test_clones_and_barriers_are_those_of_the_plan(share):
    found, _ = captured()
    plan = plan_under(found, share)
    result = rewrite(found, plan)
    compat.check_jaxpr(result)
    barriers = [
        e for e in compat.open_jaxpr(result).eqns if e.primitive.name == "optimization_barrier"
    ]
    planned = fences(found.program, plan.order)
    assert [len(e.outvars) for e in barriers] == [len(f.buffers) for f in planned]
    again = sum(found.program.steps[s].op == "dot_general" for s in plan.recomputed)
    assert counted(result)["dot_general"] == counted(found.flat)["dot_general"] + again
    assert plan.recomputed


def test_clones_keep_the_name_and_line_of_their_originals():
    found, _ = captured()
    result = rewrite(found, plan_under(found, 0.4))
    heavy = [e for e in compat.open_jaxpr(result).eqns if e.primitive.name == "dot_general"]
    assert len(heavy) > counted(found.flat)["dot_general"]
    assert all("layer" in compat.name_stack(e) for e in heavy)
    assert all(compat.user_line(e).startswith("test_rewrite.py:") for e in heavy)


def bits(values):
    """Every array as unsigned integers, NaN and signed zeros distinguished."""
    out = []
    for x in values:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        out.append(x.view(f"u{x.dtype.itemsize}") if x.dtype != bool else x)
    return out


def assert_same_bits(a, b):
    for x, y in zip(bits(a), bits(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "share, donate", [(1.0, False), (0.7, False), (0.4, False), (1.0, True), (0.7, True)]
)
def test_same_bits_op_by_op(share, donate):
    found, closed = captured(donate=donate)
    leaves = jax.tree.leaves(arguments())
    expected = jaxpr_as_fun(closed)(*leaves)
    plan = plan_under(found, share)
    assert_same_bits(jaxpr_as_fun(rewrite(found, plan))(*leaves), expected)


@pytest.mark.parametrize("order", ["traced", "canonical"])
def test_same_bits_in_any_order(order):
    found, closed = captured()
    leaves = jax.tree.leaves(arguments())
    base = tuple(range(len(found.program.steps))) if order == "traced" else None
    plan = plan_under(found, 0.5, base)
    assert_same_bits(jaxpr_as_fun(rewrite(found, plan))(*leaves), jaxpr_as_fun(closed)(*leaves))


RAW = [case for case in CASES if case.jit is jax.jit]


@pytest.mark.parametrize("case", RAW, ids=lambda c: c.name)
def test_every_family_is_captured_and_rewritten_well(case):
    fun, args = case.make(jnp.bfloat16, 1)
    found, closed = captured(fun, args)
    assert check_program(found.program) == []
    for share in (1.0, 0.6):
        plan = plan_under(found, share)
        result = rewrite(found, plan)
        compat.check_jaxpr(result)
        before, after = compat.open_jaxpr(closed), compat.open_jaxpr(result)
        assert [v.aval for v in after.invars] == [v.aval for v in before.invars]
        assert [v.aval for v in after.outvars] == [v.aval for v in before.outvars]


def test_traced_order_is_valid_with_donation():
    case = next(c for c in CASES if c.name == "mixed")
    found, _ = captured(*case.make(jnp.float32, 1), donate=True)
    assert violations(found.program, keep_plan(found.program, None, 0, 0.0)) == []


def test_deep_recomputation_is_valid_with_donation():
    found, _ = captured(donate=True)
    plan_under(found, 0.3)


@pytest.mark.parametrize("name", ["mixed", "lstm"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_families_have_the_same_bits_op_by_op(name, platform):
    case = next(c for c in CASES if c.name == name)
    fun, args = case.make(jnp.float32, 1)
    found, closed = captured(fun, args, platform=platform)
    leaves = jax.tree.leaves(args)
    plan = plan_under(found, 0.4)
    # what each equation gives depends on nothing but its inputs: rewriting keeps every bit, but for
    # sums that are made in parts on a GPU
    expected = with_sums_in_parts(found.flat) if platform == "gpu" else closed
    assert_same_bits(jaxpr_as_fun(rewrite(found, plan))(*leaves), jaxpr_as_fun(expected)(*leaves))


# -- lowering


def lowered(found, plan, platform):
    fun = jaxpr_as_fun(rewrite(found, plan))
    leaves = jax.tree.leaves(arguments())
    return jax.jit(fun).trace(*leaves).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_fences_and_clones_reach_stablehlo(platform):
    found, _ = captured()
    plan = plan_under(found, 0.5)
    text = lowered(found, plan, platform)
    assert (
        text.count("stablehlo.optimization_barrier") == len(fences(found.program, plan.order)) > 0
    )
    products = counted(rewrite(found, plan))["dot_general"]
    assert text.count("stablehlo.dot_general") == products > counted(found.flat)["dot_general"]
    keep = keep_plan(found.program, None, 0, 0.0)
    assert lowered(found, keep, platform).count("stablehlo.optimization_barrier") == 0


def test_effects_are_kept_in_order_and_emitted_once():
    def noisy(params, x):
        def loss_of(params):
            y = x
            for w in params:
                y = jnp.tanh(y @ w) * y
                shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
                y = jax.experimental.io_callback(
                    lambda v: v, shape, jax.lax.stop_gradient(y), ordered=True
                )
            return jnp.square(y).mean()

        return loss_of(params)

    found, _ = captured(noisy)
    result = rewrite(found, plan_under(found, 1.0))
    assert counted(result)["io_callback"] == DEPTH


def test_effects_without_results_are_kept():
    def noisy(params, x):
        jax.debug.print("{}", x.sum())
        return step(params, x)

    found, _ = captured(noisy)
    result = rewrite(found, plan_under(found, 1.0))
    assert sum(counted(result).values()) >= sum(counted(found.flat).values())
    assert any(e.effects for e in compat.open_jaxpr(result).eqns)
