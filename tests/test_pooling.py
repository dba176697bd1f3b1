"""Overlapping max-pools and their gradients as one kernel each: what is found, and its values."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_carried as networks

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.api.families import form_for, variant_of
from vmem_jax.capture import capture
from vmem_jax.capture.pooling import find_pooling
from vmem_jax.core.plan import Plan
from vmem_jax.rewrite.pooling import describe, with_pooling
from vmem_jax.rewrite.rewrite import rewrite

ALLOW = ("order", "recompute", "carry")


def affine(y, scale, bias):
    """A norm of each sample alone, with no statistics: its backward pass sums over all."""
    return (y.astype(jnp.float32) * scale + bias).astype(y.dtype)


def dense(y, layers):
    """Layers in a loop behind `y`."""
    y = y.mean((1, 2)).astype(jnp.float32)
    return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), y, layers)[0]


def stem(norm=networks.batch_norm, size=3, side=16, dtype="bfloat16", layers=()):
    """A step on a convolution, a batch norm, a ReLU, a max-pool and a convolution; and layers in a
    loop."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(k, (3, 3, n, 16)) for k, n in zip(keys, (3, 16), strict=False)]
    params += [jnp.ones(16), jnp.full(16, 0.1), *layers]
    x = jax.random.normal(keys[2], (8, side, side, 3))

    def step(params, x):
        def loss(params):
            first, second, scale, bias, *layers = params
            y = networks.conv(x.astype(dtype), first.astype(dtype))
            y = jax.nn.relu(norm(y, scale, bias) if norm else y)
            window = (1, size, size, 1)
            y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, (1, 2, 2, 1), "SAME")
            y = networks.conv(y, second.astype(dtype))
            y = dense(y, layers[0]) if layers else y
            return jnp.square(y.astype(jnp.float32) - 1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (params, x)


def found_in(case):
    step, args = case
    flat = capture(jax.jit(step).trace(*args).jaxpr).separate
    return flat, find_pooling(flat)


CASES = {
    "batch norm": {},
    "no norm": {"norm": None},
    "in float16": {"dtype": "float16"},
    "an odd size": {"side": 13},
}
NONE = {"windows that do not overlap": {"size": 2}, "float32": {"dtype": "float32"}}


@pytest.mark.parametrize("name", CASES)
def test_a_pool_reads_what_exists_and_keeps_its_bits(name):
    case = stem(**CASES[name])
    flat, found = found_in(case)
    eqns = compat.open_jaxpr(flat).eqns
    [each] = found
    [raw] = each.tile.rows
    [maker] = [eqn for eqn in eqns if raw in eqn.outvars]
    assert maker.primitive.name == "conv_general_dilated"
    assert describe(each, eqns) is not None
    ours = with_pooling(flat, found)
    compat.check_jaxpr(ours)
    names = [eqn.primitive.name for eqn in compat.open_jaxpr(ours).eqns]
    assert names.count("pooled_windows") == names.count("spread_windows") == 1
    assert not {"reduce_window_max", "window_index", "window_gradient"} & {*names}
    for a, b in zip(networks.rounded(ours, case[1]), networks.rounded(flat, case[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_kernel_has_no_maximum_of_tritons():
    """Which returns the other operand for a NaN."""
    flat, [each] = found_in(stem())
    described = describe(each, compat.open_jaxpr(flat).eqns)
    assert described is not None
    given = [v.aval for v in (*each.tile.rows, *each.tile.vectors)]
    names = lambda closed: {eqn.primitive.name for eqn in compat.open_jaxpr(closed).eqns}
    [raw, *vectors] = (jnp.ones((8, aval.shape[-1]), aval.dtype) for aval in given)
    vectors = [v[:1] for v in vectors]
    assert "max" in {eqn.primitive.name for eqn in described.elementwise.equations}
    assert "max" not in names(jax.make_jaxpr(described.elementwise)(raw, *vectors))
    [made] = described.elementwise(raw.at[2, 3].set(jnp.nan), *vectors)
    assert np.isnan(made[2, 3]) and np.isnan(made).sum() == 1


@pytest.mark.parametrize("name", NONE)
def test_what_xla_does_as_well_is_left_alone(name):
    assert not found_in(stem(**NONE[name]))[1]


def test_a_plan_has_it_where_allow_names_it(tmp_path):
    """The CPU is not asked otherwise."""
    step, args = stem(norm=None)  # whose sums are no pass's
    pooling = vmem_jax.jit(step, budget=1.0, policy="exact", allow=ALLOW)
    plan = pooling.plan(*args)
    assert plan.pooled == 1 and not plan.summed and not plan.carried
    assert "1 max-pools with their index" in str(plan)
    assert not vmem_jax.jit(step, budget=1.0, policy="exact").plan(*args).pooled
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=Plan.load(tmp_path / "plan.json"), allow=ALLOW)
    for a, b, c in zip(
        *(jax.tree.leaves(each(*args)) for each in (pooling, again, jax.jit(step))), strict=True
    ):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=0.01, atol=0.01)


def _within(jaxpr):
    """How often each primitive stands in a loop of `jaxpr`, and how often outside of them."""
    eqns = compat.open_jaxpr(jaxpr).eqns
    names = lambda eqns: collections.Counter(eqn.primitive.name for eqn in eqns)
    loops = [eqn.params["jaxpr"] for eqn in eqns if eqn.primitive.name == "scan"]
    return sum((names(compat.open_jaxpr(body).eqns) for body in loops), names(())), names(eqns)


@pytest.mark.parametrize("policy", ["exact", "auto"])
@pytest.mark.parametrize("count", [2, 3])  # of 4, or of 2 samples and two of 3
def test_a_pool_and_sums_run_in_sub_batches(count, policy, tmp_path):
    step, args = stem(affine)
    rounded = functools.partial(
        vmem_jax.jit, step, compiler_options={"xla_allow_excess_precision": False}
    )
    given = {"budget": 1.0, "policy": policy, "sub_batches": count}
    passing = rounded(allow=ALLOW, **given)
    plan = passing.plan(*args)
    assert (plan.sub_batches, plan.pooled, plan.summed) == (count, 1, 1)
    without = rounded(allow=ALLOW[:2], **given)
    assert not without.plan(*args).pooled

    context = passing.context(args, {}, None)
    variant = variant_of(form_for(context, plan), context.settings.policy, count)
    assert variant.program.pooled == variant.program.summed == 1
    looped, outside = _within(rewrite(variant.origin.captured, plan))
    for name in ("pooled_windows", "spread_windows", "summed_rows"):
        assert looped[name] == 1 and outside[name] == (count == 3), name
    old = {"reduce_window_max", "window_index", "window_gradient"}
    assert not old & {*looped, *outside}

    plan.save(tmp_path / "plan.json")
    again = rounded(plan=Plan.load(tmp_path / "plan.json"), allow=ALLOW)
    ours, loaded, others = (jax.tree.leaves(each(*args)) for each in (passing, again, without))
    for a, b, c in zip(ours, loaded, others, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


def test_sub_batches_are_not_asked_of_forms_with_other_stacks():
    """These run as a whole where a pool is replaced."""
    layers = jax.random.normal(jax.random.key(1), (6, 16, 16)) / 4
    step, args = stem(affine, layers=[layers])
    plan = lambda **given: vmem_jax.jit(step, budget=1.0, allow=ALLOW, **given).plan(*args)
    assert plan(sub_batches=2).pooled == plan().pooled == 1


@pytest.mark.gpu_compile
@pytest.mark.parametrize("count", [2, 3])
def test_kernels_run_in_sub_batches_on_a_card(count):
    """The first one of 3 has 84 images, the others 86."""
    step, (params, x) = stem(affine, side=112)
    x = jax.ShapeDtypeStruct((256, *x.shape[1:]), x.dtype)
    run = vmem_jax.jit(step, budget=1.0, policy="exact", sub_batches=count)
    ours = run.lower(params, x).compile(target="h200")
    assert (ours.plan.sub_batches, ours.plan.pooled, ours.plan.summed) == (count, 1, 1)
    assert ours.as_text().count("gpu.triton") == (3 if count == 2 else 6)


@pytest.mark.gpu_compile
def test_cards_on_which_it_was_timed_use_it_unasked():
    step, (params, x) = stem(side=112)
    x = jax.ShapeDtypeStruct((256, *x.shape[1:]), x.dtype)

    def compiled(target, **options):
        run = vmem_jax.jit(step, budget=1.0, policy="exact", **options)
        return run.lower(params, x).compile(target=target)

    ours, without = compiled("h200"), compiled("h200", allow="order").plan
    assert ours.plan.pooled == 1 and ours.as_text().count("gpu.triton") == 2 + ours.plan.summed
    assert ours.plan.predicted_seconds < 0.95 * without.predicted_seconds
    assert not compiled("a100").plan.pooled
