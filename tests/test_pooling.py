"""Overlapping max-pools and their gradients as one kernel each: what is found, and its values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_carried as networks

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.pooling import find_pooling
from vmem_jax.core.plan import Plan
from vmem_jax.rewrite.pooling import describe, with_pooling

ALLOW = ("order", "recompute", "carry")


def stem(norm=True, size=3, side=16, dtype="bfloat16"):
    """A step on a convolution, a batch norm, a ReLU, a max-pool and a convolution."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(k, (3, 3, n, 16)) for k, n in zip(keys, (3, 16), strict=False)]
    params += [jnp.ones(16), jnp.zeros(16)]
    x = jax.random.normal(keys[2], (8, side, side, 3))

    def step(params, x):
        def loss(params):
            first, second, scale, bias = params
            y = networks.conv(x.astype(dtype), first.astype(dtype))
            y = jax.nn.relu(networks.batch_norm(y, scale, bias) if norm else y)
            window = (1, size, size, 1)
            y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, (1, 2, 2, 1), "SAME")
            y = networks.conv(y, second.astype(dtype))
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
    "no norm": {"norm": False},
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
    step, args = stem(norm=False)  # whose sums are no pass's
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
