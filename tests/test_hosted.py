"""Arguments in pinned host memory: they stay there between steps, and the results are the same."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vmem_jax
from vmem_jax import Plan, PlanError
from vmem_jax.core.validate import violations
from vmem_jax.tracing.hosted import Donations, pairs

WIDTH, DEPTH, ROWS = 32, 5, 64
ADAM = optax.adam(1e-2)


def place(tree, kind):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    return jax.tree.map(lambda x: jax.device_put(x, sharding), tree)


def state(kind="pinned_host"):
    """Parameters on the device, Adam's moments in `kind`."""
    keys = jax.random.split(jax.random.key(0), DEPTH)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5 for k in keys]
    adam, *rest = ADAM.init(params)
    return params, (adam._replace(mu=place(adam.mu, kind), nu=place(adam.nu, kind)), *rest)


def batch():
    return jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def loss_of(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def step(state, x):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def loss_first(state, x):
    return step(state, x)[::-1]


def moments_first(state, x):
    """Results in another order than the arguments: same shapes, other memories."""
    (params, opt_state), loss = step(state, x)
    return opt_state, params, loss


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def same(a, b):
    leaves = jax.tree.leaves(a), jax.tree.leaves(b)
    return all(np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


def moments(opt_state):
    return opt_state[0].mu, opt_state[0].nu


@pytest.mark.parametrize("donate", [(), (0,)], ids=["kept", "donated"])
def test_moments_live_in_host_memory_from_step_to_step(donate):
    streamed = vmem_jax.jit(step, budget="1GiB", donate_argnums=donate)
    kept = vmem_jax.jit(step, budget="1GiB", policy="exact", donate_argnums=donate)
    a, b = state(), state("device")
    for _ in range(3):
        a, loss_a = streamed(a, batch())
        b, loss_b = kept(b, batch())
        assert same((a, loss_a), (b, loss_b))
        assert kinds(moments(a[1])) == {"pinned_host"} and kinds(a[0]) == {"device"}
    compiled = streamed.lower(a, batch()).compile()
    assert len(compiled.plan.transfers) == 4 * DEPTH and compiled.transport is None
    assert compiled.moved_nbytes == 2 * DEPTH * WIDTH * WIDTH * 4
    assert len(streamed._entries) == 1  # what comes out goes in again


def test_moments_are_streamed_around_sub_batches():
    options = dict(budget="1GiB", donate_argnums=0)
    a, b = state(), state("device")
    parts = vmem_jax.jit(step, sub_batches=4, **options)
    for _ in range(2):
        a, loss_a = parts(a, batch())
        b, loss_b = vmem_jax.jit(step, policy="exact", **options)(b, batch())
        assert kinds(moments(a[1])) == {"pinned_host"} and kinds(a[0]) == {"device"}
    for x, y in zip(jax.tree.leaves((a, loss_a)), jax.tree.leaves((b, loss_b)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
    entry = parts._entry_for((a, batch()), {}, None)
    program, plan = entry.traced.captured.program, entry.best.plan
    assert plan.sub_batches == 4 and len(plan.transfers) == 4 * DEPTH
    _, end = (p for p, s in enumerate(plan.order) if program.steps[s].is_boundary)
    assert all(t.fetch > end for t in plan.transfers)
    within = tuple(dataclasses.replace(t, fetch=end) for t in plan.transfers)
    assert violations(program, plan) == []
    assert violations(program, dataclasses.replace(plan, transfers=within))


@pytest.mark.parametrize("fun, at", [(loss_first, (1, 1)), (moments_first, (0,))])
def test_results_in_any_order_lie_where_they_belong_when_donated(fun, at):
    a = vmem_jax.jit(fun, budget="1GiB", donate_argnums=0)(state(), batch())
    b = vmem_jax.jit(fun, budget="1GiB", policy="exact")(state("device"), batch())
    assert same(a, b)
    opt_state = a
    for i in at:
        opt_state = opt_state[i]
    assert kinds(moments(opt_state)) == {"pinned_host"}
    rest = [x for x in jax.tree.leaves(a) if x.sharding.memory_kind == "device"]
    assert len(rest) == DEPTH + 2  # parameters, the count, the loss


def test_what_is_only_read_comes_and_stays_where_it_is():
    frozen = place([jnp.eye(WIDTH) * (i + 1) for i in range(2)], "pinned_host")
    head = jnp.eye(WIDTH)

    def tune(head, frozen, x):
        return head - 0.1 * jax.grad(lambda h: loss_of([*frozen, h], x))(head)

    budgeted = vmem_jax.jit(tune, budget="1GiB", donate_argnums=0)
    expected = jax.jit(tune)(head + 0, place(frozen, "device"), batch())
    found = budgeted(head + 0, frozen, batch())
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert found.sharding.memory_kind == "device" and kinds(frozen) == {"pinned_host"}
    transfers = budgeted.plan(head, frozen, batch()).transfers
    assert len(transfers) == 2 and all(t.start == t.gone == 0 for t in transfers)


def test_what_is_handed_through_is_not_moved():
    def through(kept, x):
        return kept, x + 1

    kept, _ = vmem_jax.jit(through, budget="1GiB")(place(jnp.ones(8), "pinned_host"), batch())
    assert kinds(kept) == {"pinned_host"} and same(kept, jnp.ones(8))


def test_a_saved_plan_is_for_the_same_memories(tmp_path):
    vmem_jax.jit(step, budget="1GiB").plan(state(), batch()).save(tmp_path / "step.json")
    again = vmem_jax.jit(step, plan=Plan.load(tmp_path / "step.json"))
    expected = vmem_jax.jit(step, budget="1GiB")(state(), batch())
    assert same(again(state(), batch()), expected)
    with pytest.raises(PlanError, match="another step"):
        again(state("device"), batch())


def test_moments_and_activations_move_together():
    from test_transports import FAST

    need = vmem_jax.jit(step, budget="1GiB").lower(state(), batch()).compile().plan.predicted_peak
    budgeted = vmem_jax.jit(step, budget="1GiB", allow=("order", "offload", "stream"), machine=FAST)
    entry = budgeted._entry_for((state(), batch()), {}, None)
    from vmem_jax.policy import Auto, Infeasible
    from vmem_jax.policy.streaming import Streaming

    program = entry.traced.captured.program
    policy = Streaming(Auto(allow=("order", "offload")), entry.costs.link)
    plan = policy.plan(program, entry.costs, int(0.8 * need))
    plan = plan.plan if isinstance(plan, Infeasible) else plan
    own = [t for t in plan.transfers if t.buffer not in program.hosted]
    assert own and len(plan.transfers) == len(own) + 4 * DEPTH
    given = vmem_jax.jit(step, plan=plan.__class__(**{**plan.__dict__, "budget": None}))
    found, _ = given(state(), batch())
    expected, _ = vmem_jax.jit(step, budget="1GiB")(state(), batch())
    assert same(found, expected) and kinds(moments(found[1])) == {"pinned_host"}


def test_without_leave_to_stream_it_says_which_and_what_to_write():
    with pytest.raises(ValueError) as error:
        vmem_jax.jit(step, budget="1GiB", allow=("order", "recompute"))(state(), batch())
    text = str(error.value)
    assert "10 of the arguments of `step` lie in pinned host memory, 40.00 KiB in all" in text
    assert "`state[1][0].mu[0]`, 4.00 KiB" in text and "'stream'" in text
    assert "with_memory_kind('device')" in text


def test_donated_and_not_returned_is_refused():
    with pytest.raises(ValueError, match=r"`state\[1\]\[0\].mu\[0\]` lies in pinned .* donated"):
        vmem_jax.jit(lambda state, x: step(state, x)[1], budget="1GiB", donate_argnums=0)(
            state(), batch()
        )


def test_inside_another_jit_it_says_what_to_do():
    budgeted = vmem_jax.jit(lambda m, x: m.sum() + x.sum(), budget="1GiB")
    host = place(jnp.ones((8, 8)), "pinned_host")
    with pytest.raises(ValueError, match="inside another jit"):
        jax.jit(lambda m, x: budgeted(jax.device_put(m, jax.memory.Space.Host), x))(host, batch())
    on_device = jax.jit(lambda m, x: budgeted(jax.device_put(m, jax.memory.Space.Device), x))
    np.testing.assert_allclose(on_device(host, batch()), 64 + batch().sum(), rtol=1e-5)


def test_explain_names_what_moves():
    assert "buffers moved" in str(vmem_jax.jit(step, budget="1GiB").explain(state(), batch()))


def test_pairs_go_by_shape_and_place():
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    here, there = (jax.ShapeDtypeStruct((4,), "float32", sharding=s) for s in (None, host))
    other = jax.ShapeDtypeStruct((4,), "int32", sharding=host)
    given = [here, there, there, other], [("w",), ("m", "w"), ("v", "w"), ("n",)]
    results = [here] * 4, [(0, "v", "w"), (0, "m", "w"), (1, "w"), (1, "n")]
    assert pairs(*given, *results) == ((1, 1), (2, 0), (3, None))
    # without names, by order
    assert pairs([here, there], [(), ()], [here, here], [(0,), (1,)]) == ((1, 1),)


def test_the_order_of_donations_pairs_first_with_first():
    order = Donations.of([(3, 0), (1, 2)], arguments=4, results=3)
    assert order == Donations((3, 1, 0, 2), (0, 2, 1), 2)
