"""The systems of the papers on a whole training step, on the CPU: they fit, and compute the same."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SHAPES, unit_costs

import vmem_jax
from vmem_jax import VDNN, BudgetError, LayersError, MoDNN, UCuDNN
from vmem_jax.models.vgg import VGG
from vmem_jax.policy.base import Splitting
from vmem_jax.techniques.sub_batches import Parts, by_size
from vmem_jax.transfer.extension import describe

built = pytest.mark.skipif(describe().startswith("none"), reason=f"native extension: {describe()}")


class Normed(nn.Module):
    """Convolutions with a normalisation and an activation each, which are cheap to make again."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.gelu(nn.GroupNorm(4)(nn.Conv(16, (3, 3))(x)))
        return nn.Dense(10)(x.mean((1, 2)))


MODELS = {"vgg": VGG(((16, 4), (16, 1)), classes=10, head_width=32), "normed": Normed()}


@functools.cache
def case(name="vgg"):
    """A small network with its loss, as a training step; its arguments; its result."""
    model = MODELS[name]
    x = jax.random.normal(jax.random.key(0), (32, 16, 16, 3))
    labels = jnp.arange(32) % 10
    params = model.init(jax.random.key(1), x[:1])

    def step(params, x, labels):
        def loss_of(params):
            logp = jax.nn.log_softmax(model.apply(params, x))
            return -jnp.take_along_axis(logp, labels[:, None], 1).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    args = (params, x, labels)
    return step, args, jax.jit(step)(*args)


def run(policy, budget, name="vgg"):
    """The compiled step, after its result was held against plain jit's."""
    step, args, expected = case(name)
    budgeted = vmem_jax.jit(step, budget=budget, policy=policy)
    compiled = budgeted.lower(*args).compile()
    pairs = zip(jax.tree.leaves(budgeted(*args)), jax.tree.leaves(expected), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)
    return compiled


@pytest.mark.parametrize(
    "policy, budget",
    [
        pytest.param("vdnn", 0.45, id="vdnn dyn"),
        pytest.param("superneurons", 0.45, id="superneurons"),
        pytest.param("vdnnpp", 0.45, id="vdnnpp"),
        pytest.param("modnn", 0.45, id="modnn"),
    ],
)
@built
def test_fits_and_moves_and_computes_the_same(policy, budget):
    compiled = run(policy, budget)
    plan = compiled.plan
    assert compiled.need_nbytes <= plan.budget
    assert plan.policy == getattr(policy, "name", policy)
    assert plan.transfers and compiled.transport == "ffi"
    assert 0 < compiled.pinned_nbytes == compiled.arena.counters(jax.devices()[0]).arena_nbytes
    assert compiled.timeline.peak == plan.predicted_peak
    assert compiled.timeline.seconds == plan.predicted_seconds


def test_sub_batches_that_are_not_among_the_means():
    def splits(policy, allow=None):
        step = vmem_jax.jit(abs, budget=1, policy=policy, allow=allow)
        return step._settings.splitting

    assert splits("modnn") is Splitting.FEWEST
    assert splits("modnn", ("order", "offload")) is Splitting.WHOLE
    assert splits("vdnn") is splits(MoDNN(False)) is Splitting.WHOLE
    assert splits(VDNN(sub_batches=True)) is Splitting.FEWEST
    assert splits("auto") is Splitting.FASTEST
    assert splits("auto", "order") is Splitting.WHOLE


@pytest.mark.parametrize("policy", ["vdnn"])
def test_budget_that_it_cannot_reach(policy):
    step, args, _ = case()
    with pytest.raises(BudgetError, match=f"policy `{policy}` cannot fit") as error:
        vmem_jax.jit(step, budget=0.1, policy=policy)(*args)
    assert error.value.lowest_peak > error.value.budget
    lowest = vmem_jax.jit(step, plan=error.value.lowest_plan).lower(*args).compile()
    assert lowest.need_nbytes == error.value.lowest_peak and lowest.plan.transfers


@built
def test_superneurons_makes_again_what_lies_between_convolutions():
    compiled = run("superneurons", 0.55, "normed")
    plan = compiled.plan
    assert compiled.need_nbytes <= plan.budget
    assert plan.recomputed and plan.transfers
    again = {compiled._entry.traced.captured.program.steps[s].op for s in plan.recomputed}
    assert "conv_general_dilated" not in again


@built
def test_modnn_runs_the_size_of_equation_3_with_a_smaller_sub_batch():
    """31 samples and one, of which values move in both; a saved plan runs the same."""
    step, args, expected = case()
    compiled = run(MoDNN(), 1935 * 1024)
    plan = compiled.plan
    assert (plan.sub_batches, plan.sub_batch_size) == (2, 31) and plan.transfers
    assert compiled.need_nbytes <= 1935 * 1024
    again = vmem_jax.jit(step, plan=vmem_jax.Plan.from_json(plan.to_json()))
    assert again.lower(*args).compile().need_nbytes == compiled.need_nbytes
    pairs = zip(jax.tree.leaves(again(*args)), jax.tree.leaves(expected), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)


def test_where_equation_3_has_no_size_all_are_tried_for_the_lowest_peak():
    """Sums of gradients may take more than smaller sub-batches save, as AlexNet's do."""
    program = SHAPES["chain"]
    tried = []

    def variant(samples):
        tried.append(samples)
        return SimpleNamespace(program=program, costs=unit_costs(program))

    sizes = lambda budget: by_size(Parts((1, 2, 4), lambda count: None, samples=4), variant, budget)
    counts, make = sizes(program.resident_nbytes)
    assert tried and counts == (-4, -2, -1)
    make(-2)
    assert tried[-1] == 2


def test_ucudnn_divides_convolutions_and_nothing_else():
    limit = 400 * 1024  # the convolutions of the first stage take a MiB
    compiled = run(UCuDNN("wr", limit=limit), "64MiB")
    plan = compiled.plan
    assert all(way.workspace <= limit for _, way in plan.convolutions)
    assert plan.divided and not plan.recomputed and not plan.transfers
    assert plan.order == tuple(range(len(plan.order)))


def test_ucudnn_without_a_limit_meets_what_it_meets_with_one():
    """Also where the traced order is enough, and nothing is divided."""
    limited = run(UCuDNN("wr", limit=600 * 1024), "64MiB")
    assert limited.plan.divided
    free = run(UCuDNN("wr"), limited.need_nbytes)
    assert free.need_nbytes <= limited.need_nbytes
    assert len(run(UCuDNN("wr"), 0.9).attempts) == 1


def test_what_it_needs_is_not_left_out():
    step, _, _ = case()
    with pytest.raises(ValueError, match=r"policy `vdnn` needs offload, which `allow`='order'"):
        vmem_jax.jit(step, budget=0.5, policy="vdnn", allow="order")


@built
def test_a_step_without_layers_to_move():
    forward = lambda x: jnp.tanh(x @ x) @ x
    with pytest.raises(LayersError, match="no backward pass"):
        vmem_jax.jit(forward, budget="1GiB", policy=VDNN("all"))(jnp.ones((8, 8)))
    dense = lambda w, x: w - jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum())(w)
    with pytest.raises(ValueError, match="cannot divide convolutions: it has none"):
        vmem_jax.jit(forward, budget="1GiB", policy="ucudnn")(jnp.ones((8, 8)))
    with pytest.raises(LayersError, match="moves the inputs of convolutions"):
        vmem_jax.jit(dense, budget="1GiB", policy=VDNN("conv"))(jnp.ones((8, 8)), jnp.ones((8, 8)))
