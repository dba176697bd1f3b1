"""vmem_jax.lowest: the lowest peak of a step, as it is named and as it is met."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import vmem_jax

X = jax.ShapeDtypeStruct((512, 16), jnp.float32)
WS = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 6


def step(ws, x):
    def loss(ws):
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))


def forwards(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x.sum()


def needs(fun, budget, **options):
    return vmem_jax.jit(fun, budget=budget, **options).lower(WS, X).compile().need_nbytes


@pytest.mark.parametrize("policy", ["auto", "recompute", "exact", "keep", "modnn"])
def test_what_it_returns_is_met_and_nothing_below_is(policy):
    found = vmem_jax.lowest(step, WS, X, policy=policy)
    assert needs(step, found.nbytes, policy=policy) <= found.nbytes
    with pytest.raises(vmem_jax.BudgetError) as caught:
        vmem_jax.jit(step, budget=found.nbytes - 1, policy=policy).lower(WS, X).compile()
    assert caught.value.lowest_peak == found.nbytes


def test_its_plan_reaches_it_in_the_seconds_that_it_says():
    found = vmem_jax.lowest(step, WS, X)
    made = vmem_jax.jit(step, plan=found.plan).lower(WS, X).compile()
    assert made.need_nbytes == found.nbytes
    assert found.seconds == found.plan.predicted_seconds > 0


def test_more_means_reach_no_higher_peak_and_less_than_plain():
    plain = jax.jit(step).lower(WS, X).compile().memory_analysis()
    whole = plain.argument_size_in_bytes + plain.output_size_in_bytes + plain.temp_size_in_bytes
    order = vmem_jax.lowest(step, WS, X, allow=("order",)).nbytes
    again = vmem_jax.lowest(step, WS, X, allow=("order", "recompute")).nbytes
    parts = vmem_jax.lowest(step, WS, X, batch_argnums=1).nbytes
    assert parts < again < order <= whole


def test_a_step_without_a_backward_pass_has_one():
    found = vmem_jax.lowest(forwards, WS, X)
    assert needs(forwards, found.nbytes) <= found.nbytes


@pytest.mark.parametrize("name, value", [("budget", 0.5), ("plan", None), ("tune", True)])
def test_what_it_decides_itself_is_refused(name, value):
    with pytest.raises(TypeError, match=f"takes no `{name}`"):
        vmem_jax.lowest(step, WS, X, **{name: value})


def test_a_step_that_a_policy_cannot_plan_has_that_policys_error():
    with pytest.raises(vmem_jax.VmemError):
        vmem_jax.lowest(step, WS, X, policy="ucudnn", allow=("workspace",))
