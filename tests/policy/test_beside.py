"""What is made again stands beside the backward pass that reads the same values."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BACKWARD, FORWARD, UPDATE, Builder, plan_of, unit_costs
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax.core.costs import Link
from vmem_jax.core.heap import heap_nbytes
from vmem_jax.core.merging import Merging
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import Kind, Phase
from vmem_jax.core.simulate import simulate
from vmem_jax.core.validate import violations
from vmem_jax.policy.base import finish
from vmem_jax.policy.beside import beside
from vmem_jax.policy.drop_order import order_with_drops
from vmem_jax.policy.order import canonical_order
from vmem_jax.policy.recomputation import Recomputation
from vmem_jax.rewrite.rewrite import rewrite

LAYERS, ROWS, WIDTH, HIDDEN = 6, 512, 64, 512
FAST = Link(1e15, 1e15, 1e15)


def gated(params, x):
    """Gated layers, whose hidden values are eight times as large as what they return."""

    def loss(params):
        h = x
        for gate, up, down in params:
            h = h + (jax.nn.silu(h @ gate) * (h @ up)) @ down
        return jnp.square(h.astype(jnp.float32)).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def arguments(rows=ROWS, width=WIDTH, hidden=HIDDEN, make=jax.ShapeDtypeStruct):
    layer = [
        make(dims, jnp.bfloat16) for dims in ((width, hidden), (width, hidden), (hidden, width))
    ]
    return [tuple(layer)] * LAYERS, make((rows, width), jnp.bfloat16)


def activations_again(args):
    """The captured step for a card, its costs, and a timeline that makes each activation again."""
    step = vmem_jax.jit(gated, budget=1.0, donate_argnums=0)
    context = step.context(args, {}, "h200")
    program, costs = context.traced.captured.program, context.costs
    recomputation = Recomputation(program, canonical_order(program))
    large = max(buffer.nbytes for buffer in program.buffers)
    hidden = lambda b: program.buffers[b].nbytes == large
    is_activation = lambda b: hidden(b) and program.steps[program.producer[b]].fusible
    drops = {(b, n) for b, n in recomputation.idle() if is_activation(b)}
    order = order_with_drops(recomputation, drops)
    return context.traced.captured, costs, simulate(program, order, costs)


@pytest.fixture(scope="module")
def made():
    return activations_again(arguments())


def apart(program, order):
    """For each activation that is made again, how many products stand between it and the backward
    pass that reads the same values, but for those that read it."""
    found, seen = [], set()
    for position, s in enumerate(order):
        step = program.steps[s]
        is_again = s in seen and step.fusible and step.phase is Phase.FORWARD
        seen.add(s)
        shared = {b for b in step.reads if program.buffers[b].nbytes == 2 * ROWS * HIDDEN}
        if not is_again or not shared:
            continue
        behind = [program.steps[s] for s in order[position + 1 :]]
        through = next(i for i, s in enumerate(behind) if s.fusible and shared & {*s.reads})
        products = [s for s in behind[:through] if not s.fusible]
        found.append(sum(not {*step.writes} & {*s.reads} for s in products))
    return found


def test_it_moves_behind_the_gradient_that_the_pass_waits_for(made):
    captured, costs, timeline = made
    program = captured.program
    moved = beside(program, costs, timeline)
    assert sorted(moved.order) == sorted(timeline.order)
    before, after = apart(program, timeline.order), apart(program, moved.order)
    assert len(before) == LAYERS and all(before)  # at least the gradient to the activation
    assert after.count(0) >= LAYERS // 2
    assert moved.peak <= timeline.peak and moved.seconds <= timeline.seconds
    assert not violations(program, finish("auto", program, moved, None))


def test_nothing_moves_near_the_peak_or_on_a_cpu(made, monkeypatch):
    captured, costs, timeline = made
    program = captured.program
    assert beside(program, costs, timeline) != timeline
    assert beside(dataclasses.replace(program, on_gpu=False), costs, timeline) is timeline
    monkeypatch.setattr(Merging, "near", 0.0)
    assert beside(program, costs, timeline) is timeline


@st.composite
def layered(draw):
    """A step of layers, each with an activation of one or two products, whose weight gradient, other
    readers and backward pass are drawn; on a GPU."""
    b, flip = Builder(), lambda: draw(st.booleans())
    size = lambda: draw(st.sampled_from([4, 4, 4, 1]))
    weight, x = b.input(4), b.input(4, Kind.BATCH)
    # of 1,000 it is the peak, which no move raises; of fewer some do
    x = b.step([x], 4, FORWARD, workspace=draw(st.sampled_from([1000, 50, 40, 30])))
    layers = []
    for _ in range(1 + draw(st.integers(0, 4))):
        products = [b.step([x, weight], size(), FORWARD) for _ in range(1 + flip())]
        active = b.step(products, 4, FORWARD, fusible=True)
        layers.append((x, products, active))
        x = b.step([active, weight], 4, FORWARD)
    cotangent = b.step([x], 4, BACKWARD)
    outputs = []
    for x, products, active in reversed(layers):
        gradient = None if flip() else b.step([cotangent, active], 4, BACKWARD)
        if gradient is not None and flip():
            outputs.append(b.step([gradient, weight], 4, UPDATE, fusible=True))
        inner = b.step([cotangent, weight], 4, BACKWARD)
        if gradient is None or flip():
            gradient = b.step([cotangent, active, *([inner] if flip() else [])], 4, BACKWARD)
        also = [active] if flip() and flip() else []
        through = b.step([inner, *products, *also], 4, BACKWARD, fusible=True, in_place=flip())
        cotangent = b.step([through, *([x] if flip() else []), weight], 4, BACKWARD)
        outputs.append(b.step([gradient], 4, UPDATE, fusible=True))
    return dataclasses.replace(b.program([cotangent, *outputs]), on_gpu=True)


@settings(max_examples=300, deadline=None)
@given(program=layered(), data=st.data())
def test_plans_of_random_steps_stay_valid(program, data):
    costs, recomputation = unit_costs(program), Recomputation(program, canonical_order(program))
    idle = recomputation.idle()
    drops = {drop for drop in idle if data.draw(st.integers(0, 2))}
    timeline = simulate(program, order_with_drops(recomputation, drops), costs)
    with mock.patch.object(Merging, "near", 10.0):
        moved = beside(program, costs, timeline)
    event(f"moves: {moved.order != timeline.order}")
    assert sorted(moved.order) == sorted(timeline.order)
    assert moved.peak <= timeline.peak
    assert not violations(program, plan_of(program, moved.order))


def test_nothing_moves_behind_where_the_value_that_comes_back_for_it_is_made_again():
    b = Builder()
    weight = b.input(4)
    x = b.step([b.input(4, Kind.BATCH)], 4, FORWARD, workspace=1000)  # the peak
    product = b.step([x, weight], 4, FORWARD)
    active = b.step([product], 4, FORWARD, fusible=True)
    cotangent = b.step([b.step([active, weight], 4, FORWARD)], 4, BACKWARD)
    gradient = b.step([cotangent, active], 4, BACKWARD)
    inner = b.step([cotangent, weight], 4, BACKWARD)
    through = b.step([inner, product], 4, BACKWARD, fusible=True)
    program = dataclasses.replace(b.program([gradient, through]), on_gpu=True)
    at = lambda made: program.producer[made]
    late = [at(active), at(gradient), at(inner), at(product), at(through)]
    order = (*range(at(gradient)), *late)
    assert order.count(at(active)) == order.count(at(product)) == 2
    costs = dataclasses.replace(unit_costs(program), link=FAST)
    stays = simulate(program, order, costs)
    again = order.index(at(gradient)) - 1  # the activation
    away = [Transfer(product, 3, 3, again, again)]
    with mock.patch.object(Merging, "near", 10.0):
        assert beside(program, costs, stays).order != order
        moved = beside(program, costs, simulate(program, order, costs, away))
    assert moved.order == order and heap_nbytes(program, moved.order, moved.transfers)


def test_transfers_move_with_the_steps_that_wait_for_them(made):
    captured, costs, timeline = made
    program, order = captured.program, timeline.order
    moves = []
    for b, buffer in enumerate(program.buffers):
        uses = [p for p, s in enumerate(order) if b in program.steps[s].reads]
        backwards = [p for p in uses if p > len(order) // 2]
        is_product = buffer.movable and not program.steps[program.producer[b]].fusible
        if is_product and buffer.nbytes == 2 * ROWS * HIDDEN and 0 < len(backwards) < len(uses):
            gone = uses[-len(backwards) - 1] + 1
            moves.append(Transfer(b, gone, gone, backwards[0], backwards[0]))
    assert len(moves) >= LAYERS
    moving = simulate(program, order, dataclasses.replace(costs, link=FAST), moves)
    moved = beside(program, dataclasses.replace(costs, link=FAST), moving)
    assert moved.order != order and moved.transfers != moving.transfers
    assert not violations(program, finish("auto", program, moved, None))


def test_values_are_those_of_the_step(made):
    captured, costs, timeline = made
    moved = beside(captured.program, costs, timeline)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    draw = lambda shape, dtype: jax.random.normal(next(keys), shape, dtype) / shape[0] ** 0.5
    args = arguments(make=draw)
    plan = finish("auto", captured.program, moved, None)
    ours = jaxpr_as_fun(rewrite(captured, plan))(*jax.tree.leaves(args))
    for a, b in zip(ours, jax.tree.leaves(gated(*args)), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-2, atol=2e-3)


@pytest.mark.gpu_compile
def test_a_card_runs_both_in_one_kernel():
    """One kernel with three results in place of one with two and one with one."""
    args = arguments(rows=8192, width=1024, hidden=4096)
    captured, costs, timeline = activations_again(args)
    kernels = []
    for each in (beside(captured.program, costs, timeline), timeline):
        plan = finish("auto", captured.program, each, None)
        step = vmem_jax.jit(gated, plan=plan, donate_argnums=0)
        text = step.lower(*args).compile(target="h200").as_text()
        results = ", ".join(3 * ["bf16[8192,4096]{1,0}"])
        kernels.append(text.count(f"= ({results}) fusion("))
    assert kernels[0] >= kernels[1] + LAYERS // 2
