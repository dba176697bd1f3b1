"""Layouts that XLA would spread from one small kernel over large values: stated, and priced."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture, row_major, sliced
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.row_major import as_spread, with_row_major
from vmem_jax.core import planned
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import Link, analytic
from vmem_jax.core.heap import heap_nbytes
from vmem_jax.core.planned import predicted_need, states_row_major
from vmem_jax.core.stated_layouts import left_to_xla, may_be_left
from vmem_jax.policy import Exact, SuperNeurons
from vmem_jax.rewrite import rewrite
from vmem_jax.techniques.sub_batches import parts_of

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from step_models import MODELS

MACHINE = CARDS["h200"].machine


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def convolving(layout, **options):
    """A step of momentum with a kernel in the given layout."""

    def step(w, m, x):
        def loss(w):
            y = lax.conv_general_dilated(
                x, w.astype(x.dtype), (1, 1), "SAME", None, None, layout, **options
            )
            return jnp.sin(y).sum()

        m = 0.9 * m + jax.grad(loss)(w)
        return w - 0.1 * m, m

    return step


def convolved(w, x):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
    return jnp.sin(y)


def classifying(x, w, head, tokens=1):
    """A step on the first tokens of each sample behind a product."""

    def loss(w, head):
        return jnp.sin(jnp.tanh(x @ w)[:, :tokens] @ head).sum()

    return jax.grad(loss, (0, 1))(w, head)


def labelled(x, w, labels):
    """The gradient to `w`; x f32[tokens, samples, n], labels i32[samples, tokens]."""

    def loss(w):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels.T[..., None], -1)
        return -chosen.mean()

    return jax.grad(loss)(w)


def conditioned(x, w, features, shifts):
    """What a product makes of each sample's features is added to all its tokens."""

    def loss(w, shifts):
        return jnp.sin(jnp.tanh(x @ w) + (features @ shifts)[:, None]).sum()

    return jax.grad(loss, (0, 1))(w, shifts)


def in_windows(x, w, chain=jnp.tanh):
    """Windows of 2 x 2 of x[samples, 4, 4, n], by a product."""
    n, d = len(x), x.shape[-1]
    windows = chain(x).reshape(n, 2, 2, 2, 2, d).transpose(0, 1, 3, 2, 4, 5)
    return jnp.sin(windows.reshape(-1, 4, d) @ w)


def read_twice(x, w):
    y = jnp.tanh(x)
    return in_windows(y, w, lambda y: y) + y.reshape(-1, 4, y.shape[-1])


NHWC = convolving(("NHWC", "HWIO", "NHWC"))
KERNEL, IMAGES = shaped(3, 3, 8, 16), shaped(2, 6, 6, 8, dtype=jnp.bfloat16)
TOKENS = shaped(4, 16, 8), shaped(8, 8), shaped(8, 5)
TEXTS = shaped(6, 4, 8), shaped(8, 32), shaped(4, 6, dtype=jnp.int32)
ONE_GROUP_A_CHANNEL = convolving(("NHWC", "HWIO", "NHWC"), feature_group_count=8)

# name -> (step, arguments, stated gradients, wholes and transposed arguments)
CASES = {
    "kernel": (NHWC, (KERNEL, KERNEL, IMAGES), (1, 0, 0)),
    "kernel that is not cast": (NHWC, (KERNEL, KERNEL, shaped(2, 6, 6, 8)), (1, 0, 0)),
    "gradient that is a result": (
        lambda w, x: jax.grad(lambda w: convolved(w, x).sum())(w),
        (KERNEL, shaped(2, 6, 6, 8)),
        (0, 0, 0),
    ),
    "kernel as cuDNN makes it": (
        convolving(("NHWC", "OHWI", "NHWC")),
        (shaped(16, 3, 3, 8), shaped(16, 3, 3, 8), IMAGES),
        (0, 0, 0),
    ),
    "depthwise kernel": (ONE_GROUP_A_CHANNEL, (shaped(3, 3, 1, 8),) * 2 + (IMAGES,), (0, 0, 0)),
    "one token": (classifying, TOKENS, (0, 1, 1)),  # and the gradient to it
    "half of the tokens": (lambda *a: classifying(*a, tokens=8), TOKENS, (0, 0, 0)),
    "features": (conditioned, (*TOKENS[:2], shaped(4, 3), shaped(3, 8)), (0, 0, 2)),
    "features of few tokens": (
        conditioned,
        (shaped(4, 5, 8), TOKENS[1], shaped(4, 3), shaped(3, 8)),
        (0, 0, 0),
    ),
    "a part of an argument": (lambda x, w: jnp.tanh(x[:, 0] @ w), TOKENS[:2], (0, 0, 0)),
    "transposed labels": (labelled, TEXTS, (0, 0, 1)),
    "labels of few words": (labelled, (TEXTS[0], shaped(8, 7), TEXTS[2]), (0, 0, 0)),
    "windows": (in_windows, (shaped(3, 4, 4, 8), shaped(8, 8)), (0, 0, 1)),
    "windows of an argument": (
        functools.partial(in_windows, chain=lambda x: x),
        (shaped(3, 4, 4, 8), shaped(8, 8)),
        (0, 0, 0),
    ),
    "windows of what is read as it is": (
        read_twice,
        (shaped(3, 4, 4, 8), shaped(8, 8)),
        (0, 0, 0),
    ),
    "a transposed matrix": (
        lambda x, w: jnp.tanh(x @ w.T),
        (shaped(99, 8), shaped(8, 8)),
        (0, 0, 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_xla_would_spread_is_stated_and_values_are_the_same(name):
    fun, shapes, expected = CASES[name]
    draw = np.random.default_rng(0).normal
    args = [jnp.asarray(draw(size=s.shape), s.dtype) for s in shapes]
    flat = flatten(jax.make_jaxpr(fun)(*args))
    stated, spread = with_row_major(flat, "gpu")
    assert (len(spread.gradients), len(spread.wholes)) == expected[:2]
    assert str(stated).count("layout_constraint") == sum(expected)
    assert with_row_major(flat, "cpu")[0] is flat
    # equation by equation: what XLA:CPU fuses it rounds and sums otherwise
    ours, theirs = (jaxpr_as_fun(closed)(*args) for closed in (stated, flat))
    for mine, its in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_a_chain_writes_what_it_transposes_for_a_product():
    x, w = shaped(3, 4, 4, 8), shaped(8, 8)
    found = capture(jax.jit(in_windows).trace(x, w).jaxpr, platform="gpu")
    [product] = [step for step in found.program.steps if step.is_heavy]
    shapes = {found.variables[b].aval.shape for b in product.reads}
    assert shapes == {(3, 2, 2, 2, 2, 8), w.shape}


def deep(ws, x):
    """Four layers with a kernel each, updated as they are read."""

    def loss(ws):
        y = x
        for w in ws:
            y = convolved(w, y)
        return y.sum()

    return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws), strict=True)]


@pytest.mark.parametrize(
    "taps, size, batch, stated",
    [
        pytest.param(3, 16, 1, 0, id="kernels are most of it"),
        pytest.param(3, 16, 512, 4, id="kernels are little of it"),
        pytest.param(1, 16, 1, 4, id="one tap"),
        pytest.param(7, 7, 1, 4, id="as large as its images"),
    ],
)
def test_a_plan_states_layouts_unless_it_needs_more_memory_so(taps, size, batch, stated):
    args = [shaped(taps, taps, 64, 64)] * 4, shaped(batch, size, size, 64)
    donated = [True] * 4 + [False]
    found = capture(jax.make_jaxpr(deep)(*args), donated=donated, platform="gpu")
    plan = Exact().plan(found.program, analytic(found.program, MACHINE), None)
    assert str(found.flat).count("layout_constraint") == 4
    assert str(rewrite(found, plan)).count("layout_constraint") == stated
    left = predicted_need(left_to_xla(found.program), plan)
    assert predicted_need(found.program, plan) == left or stated


def test_a_plan_that_moves_states_no_layouts_for_which_it_may_need_more_memory(monkeypatch):
    """XLA may transpose all ten kernels of 4.5 MiB in front of the first layer, which makes 32."""

    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = convolved(w, y[:, ::4, ::4] if w.shape[2] == 64 < w.shape[3] else y)
            return jnp.mean(y**2)

        return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws), strict=True)]

    half = functools.partial(shaped, dtype=jnp.bfloat16)
    wide = [half(3, 3, 512, 512)] * 10
    ws = [half(3, 3, 3, 64), *[half(3, 3, 64, 64)] * 2, half(3, 3, 64, 512), *wide]
    args = ws, half(64, 64, 64, 3)
    donated = [True] * len(ws) + [False]
    program = capture(jax.make_jaxpr(step)(*args), donated=donated, platform="gpu").program
    costs = dataclasses.replace(analytic(program, MACHINE), link=Link(5e10, 5e10, 5e10))
    plan = SuperNeurons().plan(program, costs, 1).plan
    assert plan.transfers and not states_row_major(program, plan)
    late = lambda *args, early=False, **options: heap_nbytes(*args, **options)
    monkeypatch.setattr(planned, "heap_nbytes", late)
    assert states_row_major(program, plan)


@pytest.mark.parametrize("dtype, optional", [(jnp.float32, 1), (jnp.bfloat16, 0)])
def test_what_is_cast_is_stated_in_every_plan(dtype, optional):
    args = KERNEL, KERNEL, shaped(2, 6, 6, 8, dtype=dtype)
    steps = capture(jax.make_jaxpr(NHWC)(*args), platform="gpu").program.steps
    assert sum(may_be_left(step) for step in steps) == optional


def priced(fun, shapes):
    """Seconds of the step with layouts stated, and as it was written."""
    found = capture(jax.make_jaxpr(fun)(*shapes), platform="gpu")
    costs = analytic(found.program, MACHINE)
    written = as_spread(costs, found.program, found.variables, found.written.spread, MACHINE)
    return sum(costs.seconds), sum(written.seconds)


def test_an_update_in_the_layout_of_its_gradient_reads_sectors_and_copies_results():
    kernel, images = shaped(3, 3, 512, 1024), shaped(2, 8, 8, 512, dtype=jnp.bfloat16)
    ours, written = priced(NHWC, (kernel, kernel, images))
    nbytes = kernel.size * 4
    assert written - ours == pytest.approx((2 * 7 + 2 * 2) * nbytes / MACHINE.bandwidth)


def test_products_of_a_value_whose_samples_come_last_read_copies():
    fun, shapes, _ = CASES["one token"]
    ours, written = priced(fun, shapes)
    assert written > ours
    ours, written = priced(*CASES["half of the tokens"][:2])
    assert written == ours


@pytest.mark.gpu_compile
def test_xla_lays_out_the_residual_stream_as_its_products_do():
    pytest.importorskip("jax_plugins.xla_cuda13")

    def step(x, first, places, w, v, head):
        def loss(first, places, w, v, head):
            y = jnp.pad(x @ first, ((0, 0), (1, 0), (0, 0))) + places
            for _ in range(2):
                normal = jax.nn.standardize(y.astype(jnp.float32)).astype(y.dtype)
                y = y + jax.nn.gelu(normal @ w) @ v
            return jnp.sin(y[:, 0].astype(jnp.float32) @ head).sum()

        return jax.grad(loss, (0, 1, 2, 3, 4))(first, places, w, v, head)

    half = functools.partial(shaped, dtype=jnp.bfloat16)
    args = half(64, 196, 768), half(768, 512), half(197, 512), half(512, 2048), half(2048, 512)
    compiled = lambda **options: (
        vmem_jax.jit(step, budget="8GiB", **options)
        .lower(*args, shaped(512, 1000))
        .compile(target="h200")
        .as_text()
    )
    last = re.compile(r"\[197,512,64\]")
    assert not last.search(compiled(policy="exact"))
    assert last.search(compiled(policy="keep"))


@pytest.mark.gpu_compile
def test_xla_lays_out_what_is_conditioned_as_its_products_do(monkeypatch):
    """Shifts and scales of each sample's tokens, made of its features."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    dit = MODELS["dit"]("plain", 64, layers=1)
    shapes = [jax.eval_shape(make, jax.random.key(0)) for make in (dit.init, dit.batch)]
    compiled = lambda: (
        vmem_jax.jit(dit.step, budget="8GiB", policy="exact")
        .lower(*shapes)
        .compile(target="h200")
        .as_text()
    )
    samples_last = re.compile(r"bf16\[256,768,64\]")
    assert not samples_last.search(compiled())
    monkeypatch.setattr(row_major, "_of_samples", lambda eqns: set())
    assert samples_last.search(compiled())


def test_what_a_loop_makes_is_left_alone():
    """Its mean over tokens is what a product reads."""

    def step(w, head, x):
        def loss(w, head):
            y = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)[0]
            return jnp.sin(y.mean(1) @ head).sum()

        return jax.grad(loss, (0, 1))(w, head)

    given = shaped(3, 32, 32), shaped(32, 8), shaped(4, 64, 32)
    eqns = capture(jax.jit(step).trace(*given).jaxpr, platform="gpu").flat.jaxpr.eqns
    loops = {v for e in eqns if e.primitive.name == "scan" for v in e.outvars}
    stated = {e.invars[0] for e in eqns if e.primitive.name == "layout_constraint"}
    assert loops and loops.isdisjoint(stated)


@pytest.mark.gpu_compile
def test_xla_makes_no_copies_of_logits_beside_transposed_labels(monkeypatch):
    pytest.importorskip("jax_plugins.xla_cuda13")

    made = MODELS["lstm"]("plain", 16, layers=1, width=256, tokens=128)
    shapes = [jax.eval_shape(draw, jax.random.key(0)) for draw in (made.init, made.batch)]
    options = {"budget": "8GiB", "policy": "exact", "donate_argnums": 0}
    compiled = lambda: (
        vmem_jax.jit(made.step, **options).lower(*shapes).compile(target="h200").as_text()
    )
    samples_first = re.compile(r"\[16,128,1000\]")
    assert not samples_first.search(compiled())
    monkeypatch.setattr(row_major, "_turned", lambda *args: set())
    assert samples_first.search(compiled())


def read_by_time(params, texts):
    """A language model whose recurrent layer reads tokens one after the other, and whose labels are
    those of the samples one after the other; texts i32[samples, tokens]."""

    def loss(params):
        table, w, u, bias, head = params
        words = table[texts[:, :-1].T]

        def once(state, row):
            state = jnp.tanh(row @ w + state @ u + bias)
            return state, state

        states = lax.scan(once, jnp.zeros(words.shape[1:]), words)[1]
        logits = jnp.swapaxes(states, 0, 1) @ head
        return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


TIMED = (
    [shaped(300, 64), shaped(64, 64), shaped(64, 64), shaped(64), shaped(64, 300)],
    shaped(16, 129, dtype=jnp.int32),
)


@pytest.mark.parametrize(("target", "stated"), [("h200", 2), (None, 0)])
def test_what_is_cut_out_of_an_argument_for_a_sub_batch_is_stated_to_lie_as_it_does(target, stated):
    step = vmem_jax.jit(read_by_time, budget="1GiB", policy="exact", sub_batches=2)
    context = step.context(TIMED, {}, target)
    variant = parts_of(context).into(2)
    assert str(variant.captured.flat).count("layout_constraint") == stated


@pytest.mark.gpu_compile
@pytest.mark.parametrize("count", [2, 3])
def test_xla_lays_out_logits_of_a_sub_batch_as_their_products_do(monkeypatch, count):
    pytest.importorskip("jax_plugins.xla_cuda13")
    options = {"budget": "1GiB", "policy": "exact", "sub_batches": count, "donate_argnums": 0}
    compiled = lambda: (
        vmem_jax.jit(read_by_time, **options).lower(*TIMED).compile(target="h200").as_text()
    )
    time_first = re.compile(r"f32\[128,\d,300\]|f32\[\d,128,300\]\{2,0,1\}")
    assert not time_first.search(compiled())
    monkeypatch.setattr(sliced, "laid_out", lambda x: x)
    assert time_first.search(compiled())


@pytest.mark.gpu_compile
def test_xla_updates_kernels_in_place():
    pytest.importorskip("jax_plugins.xla_cuda13")
    kernel, images = shaped(3, 3, 256, 256), shaped(8, 16, 16, 256, dtype=jnp.bfloat16)
    compiled = lambda policy: (
        vmem_jax.jit(NHWC, budget="8GiB", policy=policy, donate_argnums=(0, 1))
        .lower(kernel, kernel, images)
        .compile(target="h200")
    )
    made, plain = compiled("exact"), compiled("keep")
    assert "f32[256,3,3,256]" not in made.as_text()
    assert "f32[256,3,3,256]" in plain.as_text()
    assert plain.plan.predicted_seconds > made.plan.predicted_seconds


def by_layers(step):
    """The weights of all layers in one array, each used by itself."""

    def loss(w, x):
        for i in range(w.shape[0]):
            x = jnp.tanh(x @ w[i])
        return x.sum()

    return jax.grad(loss)(*step)


def test_gradients_that_become_parts_of_an_array_are_row_major():
    args = jnp.ones((3, 16, 16)), jnp.ones((8, 16))
    flat = flatten(jax.make_jaxpr(lambda *a: by_layers(a))(*args))
    other, _ = with_row_major(flat, "gpu")
    stated = [e for e in compat.open_jaxpr(other).eqns if e.primitive.name == "layout_constraint"]
    assert len(stated) == 3
    maker = {v: e for e in compat.open_jaxpr(other).eqns for v in e.outvars}
    assert {maker[e.invars[0]].primitive.name for e in stated} == {"transpose"}
    alone = flatten(
        jax.make_jaxpr(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()))(args[0][0], args[1])
    )
    assert with_row_major(alone, "gpu")[0] is alone
