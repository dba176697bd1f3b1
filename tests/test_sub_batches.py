"""Sub-batches: which steps can be split, and that the split ones compute the same."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.batch import Batch, Mixing, follow_batch
from vmem_jax.capture.layouts import Layout, reshaped
from vmem_jax.conv.pick import slice_by_xla
from vmem_jax.core.convolution import Configuration
from vmem_jax.core.plan import keep_plan
from vmem_jax.core.program import BEGIN, END, Phase
from vmem_jax.core.validate import violations
from vmem_jax.rewrite.rewrite import rewrite

N, WIDTH, CLASSES = 10, 6, 5
rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape)
X, Y = normal(N, WIDTH), rng.integers(0, CLASSES, N).astype(np.int32)
MASK = (rng.random(N) < 0.7).astype(np.float64)
W = {"a": normal(WIDTH, WIDTH), "b": normal(WIDTH), "c": normal(WIDTH, CLASSES)}
KEY = np.array([3, 5], np.uint32)


@pytest.fixture(autouse=True)
def double():
    """Sums in another order differ by rounding alone: in float64 that is below 1e-10."""
    with jax.enable_x64(True):
        yield


def hidden(w, x):
    return jnp.tanh(x @ w["a"] + w["b"])


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(w, x):
    """Over `WIDTH` positions of two features."""
    q = x.reshape(x.shape[0], WIDTH, 1) * jnp.array([1.0, -0.5])
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, q @ w["a"][:2, :2]) + causal(), -1)
    return jnp.einsum("bts,bsd->btd", weights, q).reshape(x.shape[0], -1)[:, ::2] @ w["c"]


def causal():
    return jnp.where(jnp.tril(jnp.ones((WIDTH, WIDTH), bool)), 0.0, -1e9)


def convolutions(w, x):
    images = jnp.tile(x[:, :, None, None], (1, 1, 6, 2))
    dims = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
    kernel = w["a"][:2, :4].reshape(1, 2, 2, 2)
    y = jax.nn.relu(lax.conv_general_dilated(images, kernel, (1, 2), "SAME", **dims))
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 1, 1), (1, 2, 1, 1), "VALID")
    y = lax.conv_transpose(y, kernel, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y.reshape(x.shape[0], -1)[:, :WIDTH] @ w["c"]


def scanned(w, x):
    """Layers in a scan, with dropout in it: each layer's bits are its own."""

    def layer(carry, key):
        kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.8, carry.shape)
        return hidden(w, jnp.where(kept, carry, 0)), carry.mean(-1)

    keys = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(KEY), 3))
    x, means = lax.scan(layer, x, keys)
    return x @ w["c"] + means.sum(0)[:, None]


def barriers(w, x):
    """Layers in a scan that holds its index behind barriers, beside samples."""

    def layer(carry, k):
        for _ in range(2):
            k, carry = lax.optimization_barrier((k, carry))
            scale = lax.dynamic_index_in_dim(jnp.arange(1.0, 5.0), k + 1)
            carry = hidden(w, carry[None] * scale)[0]
        return carry, None

    return lax.scan(layer, x, jnp.arange(3))[0] @ w["c"]


def dropped(w, x, shape=None):
    key = jax.random.wrap_key_data(KEY)
    kept = jax.random.bernoulli(key, 0.8, shape or x.shape)
    return jnp.where(kept, hidden(w, x) / 0.8, 0) @ w["c"]


def dropped_rows_of_eight(w, x):
    """Rows of hidden values that are padded, and their dropout mask with them."""
    pad = lambda h: jnp.pad(h, ((0, 0), (0, 3)))
    key = jax.random.wrap_key_data(KEY)
    kept = pad(jax.random.bernoulli(key, 0.8, x.shape))[:, : WIDTH + 1]
    return jnp.where(kept, pad(hidden(w, x))[:, : WIDTH + 1], 0)[:, :WIDTH] @ w["c"]


def gradients_of_each(w, x, y, mask):
    """Gradients of each sample, which are scaled by their norm before they are added."""

    def loss(kernels, x, y):
        same = functools.partial(
            lax.conv_general_dilated,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        hidden = jnp.tanh(same(x.reshape(1, WIDTH // 2, 1, 2), kernels[0]))
        out = same(hidden, kernels[1], feature_group_count=3)
        return jnp.square(out.mean((1, 2)) - y).sum()

    kernels = jnp.full((3, 3, 2, 3), w["c"].mean()), jnp.full((3, 3, 1, 6), w["c"].max())
    each = jax.vmap(jax.grad(loss), (None, 0, 0))(kernels, x, y)
    norm = jnp.sqrt(sum(jnp.square(g).reshape(x.shape[0], -1).sum(1) for g in each))
    return [jnp.einsum("n,n...->...", 1 / jnp.maximum(norm, 0.1), g) for g in each]


def per_sample_keys(w, x):
    keys = jax.random.split(jax.random.wrap_key_data(KEY), x.shape[0])
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
    return (hidden(w, x) + noise) @ w["c"]


def of(logits):
    """A training step whose loss is the mean cross-entropy of `logits`."""
    return training(lambda w, x, y, mask: cross_entropy(logits(w, x), y).mean())


def training(loss):
    def step(w, x, y, mask):
        value, grads = jax.value_and_grad(loss)(w, x, y, mask)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    return step


def adamw(w, x, y, mask):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    state = tx.init(w)
    grads = jax.grad(lambda w: cross_entropy(hidden(w, x) @ w["c"], y).mean())(w)
    updates, state = tx.update(grads, state, w)
    return optax.apply_updates(w, updates), state


def metrics(w, x, y, mask):
    logits = hidden(w, x) @ w["c"]
    losses = cross_entropy(logits, y)
    right = logits.argmax(-1) == y
    return {
        "accuracy": right.mean(),
        "count": right.sum(),
        "weighted": jnp.average(losses, weights=mask),
        "losses": losses,
        "median": jnp.median(losses),
        "worst": losses.max(),
        "share": losses / losses.sum(),
        "top": lax.top_k(logits, 2),
        "seen": x.shape[0] + w["b"].sum(),
    }


def embedded(w, x, y, mask):
    loss = lambda w: jnp.square(w["c"].T[y] @ w["a"]).mean()
    return jax.grad(loss)(w)


def bfloat16(w, x, y, mask):
    low = lambda tree: jax.tree.map(lambda v: v.astype(jnp.bfloat16), tree)
    grads = jax.grad(lambda w: jnp.square(hidden(w, low(x))).sum())(low(w))
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads)


def time_major(w, x, y, mask):
    steps = jnp.tile(x.T[:, :, None], (1, 1, 3))  # time, batch, 3
    return (jnp.tanh(steps.reshape(-1, 3) @ w["a"][:3])).reshape(WIDTH, x.shape[0], WIDTH).sum(0)


SPLIT = {
    "mean": training(lambda w, x, y, mask: jnp.square(hidden(w, x)).mean()),
    "sum": training(lambda w, x, y, mask: jnp.square(hidden(w, x)).sum()),
    "masked mean": training(
        lambda w, x, y, mask: (cross_entropy(hidden(w, x) @ w["c"], y) * mask).sum() / mask.sum()
    ),
    "weighted by labels": training(
        lambda w, x, y, mask: jnp.average(cross_entropy(hidden(w, x) @ w["c"], y), weights=y + 1.0)
    ),
    "normalised input": training(
        lambda w, x, y, mask: jnp.square(hidden(w, (x - x.mean(0)) / x.std(0))).mean()
    ),
    "regularised": training(
        lambda w, x, y, mask: hidden(w, x).mean() + sum(map(jnp.vdot, w.values(), w.values()))
    ),
    "cross-entropy": of(lambda w, x: hidden(w, x) @ w["c"]),
    "picked by place": training(
        lambda w, x, y, mask: jax.nn.log_softmax(x @ w["c"])[jnp.arange(x.shape[0]), y].mean()
    ),
    "one-hot": training(
        lambda w, x, y, mask: (jax.nn.one_hot(y, CLASSES) * (hidden(w, x) @ w["c"])).sum(-1).mean()
    ),
    "layer norm": of(lambda w, x: layer_norm(hidden(w, layer_norm(x))) @ w["c"]),
    "dropout": of(dropped),
    "dropout over features": of(lambda w, x: dropped(w, x, (1, WIDTH))),
    "dropout of padded rows": of(dropped_rows_of_eight),
    "gradients of each sample": gradients_of_each,
    "a key a sample": of(per_sample_keys),
    "attention": of(attention),
    "convolutions": of(convolutions),
    "mapped": of(lambda w, x: jax.vmap(lambda x: hidden(w, x) @ w["c"])(x)),
    "checkpointed": of(lambda w, x: jax.checkpoint(hidden)(w, x) @ w["c"]),
    "layers in a scan": of(scanned),
    "layers behind barriers": of(barriers),
    "a sum over layers, from a literal": training(
        lambda w, x, y, mask: lax.scan(
            lambda total, k: (total + jnp.square(hidden(w, x) * k).sum(), None),
            0.0,
            jnp.arange(2.0),
        )[0]
    ),
    "clipped adamw": adamw,
    "metrics": metrics,
    "embedding": embedded,
    "bfloat16": bfloat16,
    "time first": time_major,
    "stacked": of(lambda w, x: jnp.stack(jnp.unstack(hidden(w, x), axis=1)[:2], 1) @ w["c"][:2]),
    "of the inputs": lambda w, x, y, mask: jax.grad(lambda x: hidden(w, x).sum())(x),
}


def traced(fun, platform=""):
    args = (W, X, Y, MASK)
    closed = jax.jit(fun).trace(*args).jaxpr
    captured = capture(closed, platform=platform)
    count = len(jax.tree.leaves(W))
    layouts = [None] * count + [Layout(0)] * 3
    return captured, follow_batch(captured.flat, layouts, N), jax.tree.leaves(args)


@pytest.mark.parametrize("name", SPLIT)
def test_sub_batches_compute_what_the_whole_batch_does(name):
    captured, batch, leaves = traced(SPLIT[name])
    assert isinstance(batch, Batch), batch
    split = captured.in_sub_batches(batch, 3)  # of 2, 4 and 4 samples
    assert (split.sub_batches.count, split.sub_batches.size) == (3, 4)
    assert split.sub_batches.smaller_size == 2 and split.program.sub_batches == 3
    compat.check_jaxpr(split.flat)
    rewritten = rewrite(split, keep_plan(split.program, None, 0, 0.0))
    compat.check_jaxpr(rewritten)
    assert len([eqn for eqn in compat.open_jaxpr(rewritten).eqns if eqn.primitive.name == "scan"])
    whole = jax.jit(SPLIT[name])(W, X, Y, MASK)
    parts = jax.jit(jaxpr_as_fun(rewritten))(*leaves)
    tolerance = 1e-2 if name == "bfloat16" else 1e-10
    for a, b in zip(jax.tree.leaves(whole), parts, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [6, 7, 9])
def test_a_smaller_sub_batch_of_any_size(size):
    """Those that are left, and then as many samples as are wanted, with what moves in both."""
    captured, batch, leaves = traced(SPLIT["layer norm"])
    split = captured.in_sub_batches(batch, 2, size=size)
    program = split.program
    assert (split.sub_batches.size, split.sub_batches.smaller_size) == (size, N - size)
    assert program.sub_batches == 2 and program.sub_batch_size == size
    inside = {b for step in program.steps if step.times == 2 for b in step.writes}
    moved = [b for b in inside if program.buffers[b].movable and program.buffers[b].nbytes]
    assert moved
    for b in moved:  # what is of samples is smaller
        now, smaller = program.buffers[b].nbytes, program.smaller_nbytes[b]
        assert smaller in (now, now * (N - size) // size)
    assert captured.in_sub_batches(batch, 2).program.sub_batch_size is None
    parts = jax.jit(jaxpr_as_fun(rewrite(split, keep_plan(program, None, 0, 0.0))))(*leaves)
    whole = jax.jit(SPLIT["layer norm"])(W, X, Y, MASK)
    for a, b in zip(jax.tree.leaves(whole), parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_product_is_there_beside_the_total_that_it_is_added_to_on_a_cpu(platform):
    """XLA:CPU adds it in a kernel of its own, so for a moment both exist. cuBLAS adds it itself."""
    captured, batch, _ = traced(SPLIT["sum"], platform)
    program = captured.in_sub_batches(batch, 2).program
    [begin] = (step for step in program.steps if step.op == BEGIN)
    [gradient] = (s for s in program.steps if s.op == "dot_general" and s.phase is Phase.BACKWARD)
    [reader] = (s for s in program.steps if {*gradient.writes} & {*s.reads})
    added = reader if platform == "cpu" else gradient
    assert reader.op == (END if platform == "gpu" else "add")
    totals = {*begin.writes} & {*added.reads}
    assert {(b, *added.writes) for b in totals} <= {*added.in_place} != set()
    assert (platform == "cpu") == ({*begin.writes}.isdisjoint(gradient.reads))


def test_convolutions_in_micro_batches_within_sub_batches():
    captured, batch, leaves = traced(SPLIT["convolutions"])
    split = captured.in_sub_batches(batch, 3)
    halves = {
        s: Configuration((slice_by_xla(step.convolution.with_batch(2)),) * 2)
        for s, step in enumerate(split.program.steps)
        if step.convolution
    }
    plan = keep_plan(split.program, None, 0, 0.0)
    plan = dataclasses.replace(plan, fenced=True, convolutions=tuple(halves.items()))
    assert halves and violations(split.program, plan) == []
    rewritten = rewrite(split, plan)
    parts = jax.jit(jaxpr_as_fun(rewritten))(*leaves)
    whole = jax.jit(SPLIT["convolutions"])(W, X, Y, MASK)
    for a, b in zip(jax.tree.leaves(whole), parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def batch_norm(x):
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)


def contrastive(w, x, y, mask):
    z = hidden(w, x)
    return -jnp.diag(jax.nn.log_softmax(z @ z.T)).mean()


def named(loss):
    def of_layer(w, x, y, mask):
        with jax.named_scope("mixer"):
            return loss(w, x, y, mask)

    return training(of_layer)


MIXED = {
    "batch norm": (lambda w, x, y, m: (batch_norm(x @ w["a"]) @ w["c"]).mean(), "reduce_sum"),
    "maximum": (
        lambda w, x, y, m: (hidden(w, x).max(0) - hidden(w, x) @ w["a"]).sum(),
        "reduce_max",
    ),
    "contrastive": (contrastive, "dot_general"),
    "sorted": (lambda w, x, y, m: (jnp.sort(x @ w["a"], 0) @ w["c"]).sum(), "sort"),
    "rolled": (lambda w, x, y, m: (jnp.roll(hidden(w, x), 1, 0) @ w["c"]).mean(), "slice"),
    "reversed": (lambda w, x, y, m: (hidden(w, x)[::-1] @ w["c"]).mean(), "rev"),
    "scanned over": (
        lambda w, x, y, m: (
            lax.scan(lambda c, x: (c + x, c * x), x[0], x @ w["a"])[1] @ w["c"]
        ).sum(),
        "scan",
    ),
    "half of it": (lambda w, x, y, m: (hidden(w, x)[: N // 2] @ w["c"]).mean(), "slice"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_samples_is_named(name):
    loss, op = MIXED[name]
    captured, found, _ = traced(named(loss))
    assert isinstance(found, Mixing)
    eqn = compat.open_jaxpr(captured.flat).eqns[found.mixer]
    assert eqn.primitive.name == op and "mixer" in compat.name_stack(eqn)
    assert compat.user_line(eqn).startswith("test_sub_batches.py:")


def test_what_leads_to_mixed_samples_alone_leaves_nothing_to_split():
    def step(w, x):
        mixed = (x * 2)[None].reshape(4, 16 * x.shape[1])  # before anything else reads the samples
        return jax.grad(lambda w: jnp.tanh(mixed @ w).sum())(w)

    flat = capture(jax.make_jaxpr(step)(jnp.ones((48, 5)), jnp.ones((64, 3)))).separate
    found = follow_batch(flat, [None, Layout(0)], 64)
    assert isinstance(found, Mixing) and found.why


def test_reshapes_carry_the_samples_along():
    size = 6
    for shape, layout, new in (
        ((6, 4, 5), Layout(0), (24, 5)),
        ((24, 5), Layout(0, 1, 4), (6, 20)),
        ((4, 6, 5), Layout(1), (24, 5)),
        ((24, 5), Layout(0, 4, 1), (2, 12, 5)),
        ((2, 12, 5), Layout(1, 2, 1), (2, 2, 6, 5)),
        ((2, 12, 5), Layout(1, 2, 1), (120,)),
    ):
        x = np.arange(np.prod(shape)).reshape(shape)
        found = reshaped(layout, shape, new, size)
        assert found is not None
        for sample in range(size):
            ours = take(x, layout, sample, size)
            assert np.array_equal(
                np.ravel(ours), np.ravel(take(x.reshape(new), found, sample, size))
            )
    assert reshaped(Layout(0), (6, 4), (3, 2, 4), size) is None


def take(x, layout, sample, size):
    parts = (layout.outer, size, layout.inner)
    opened = x.reshape(*x.shape[: layout.dim], *parts, *x.shape[layout.dim + 1 :])
    return np.take(opened, sample, layout.dim + 1)


# -- by brute force: random networks, and what a sample's row depends on

PER_SAMPLE = (
    lambda w, x: jnp.tanh(x),
    lambda w, x: x @ w["a"],
    lambda w, x: layer_norm(x),
    lambda w, x: x * jax.random.normal(jax.random.wrap_key_data(KEY), x.shape),
    lambda w, x: x.reshape(x.shape[0], 2, -1).transpose(1, 0, 2).sum(0).repeat(2, -1),
    lambda w, x: jnp.concatenate([x[:, 3:], x[:, :3]], 1),
    lambda w, x: jnp.cumsum(x, 1),
    lambda w, x: jnp.take_along_axis(x, x.argsort(-1), -1),
    lambda w, x: x + jnp.arange(float(N))[:, None],
)
ACROSS = (
    lambda w, x: batch_norm(x),
    lambda w, x: x - x.max(0),
    lambda w, x: jnp.sort(x, 0),
    lambda w, x: jnp.roll(x, 1, 0),
    lambda w, x: x.T.reshape(x.shape),
    lambda w, x: jax.nn.softmax(x @ x.T) @ x,
)


@pytest.mark.parametrize("seed", range(16))
def test_what_can_be_split_is_what_no_other_sample_changes(seed):
    draw = np.random.default_rng(seed)
    layers = [PER_SAMPLE[i] for i in draw.integers(0, len(PER_SAMPLE), 4)]
    layers.insert(0, PER_SAMPLE[1])
    if draw.random() < 0.5:
        layers.insert(draw.integers(1, len(layers)), ACROSS[draw.integers(0, len(ACROSS))])
    network = lambda w, x: functools.reduce(lambda x, layer: layer(w, x), layers, x) @ w["a"]
    other = X.copy()
    other[N // 2 :] = normal(N - N // 2, WIDTH)[draw.permutation(N - N // 2)]
    same = np.allclose(network(W, X)[: N // 2], network(W, other)[: N // 2], atol=1e-9)
    _, found, _ = traced(training(lambda w, x, y, mask: jnp.square(network(w, x)).mean()))
    assert isinstance(found, Batch) == same, found


def cudnn_step(has_bias=False, **options):
    """A gradient through cuDNN's attention of 8 sequences, and what it takes."""

    def step(w, x, bias, lengths):
        def loss(w, bias):
            q, k, v = jnp.split(x * w, [4, 6], 2)
            given = {"bias": bias} if has_bias else {"query_seq_lengths": lengths}
            how = {"implementation": "cudnn", **options}
            y = jax.nn.dot_product_attention(q, k, v, **given, key_value_seq_lengths=lengths, **how)
            return jnp.square(y).sum().astype(jnp.float32)

        return jax.grad(loss, (0, 1) if has_bias else 0)(w, bias)

    shapes = {"w": (64,), "x": (8, 128, 8, 64), "bias": (1, 4, 128, 128)}
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes.values()]
    return step, [*args, jax.ShapeDtypeStruct((8,), jnp.int32)]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("has_bias", [False, True])
def test_cudnns_attention_is_of_each_sequence_for_itself(has_bias):
    step, args = cudnn_step(has_bias, is_causal=not has_bias)
    captured = capture(jax.jit(step).trace(*args).jaxpr)
    layouts = [None, Layout(0), None, Layout(0)]
    batch = follow_batch(captured.flat, layouts, 8)
    assert isinstance(batch, Batch), batch
    split = captured.in_sub_batches(batch, 4)
    eqns = compat.open_jaxpr(rewrite(split, keep_plan(split.program, None, 0, 0.0))).eqns
    [loop] = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    inside = compat.open_jaxpr(loop.params["jaxpr"]).eqns
    calls = [eqn for eqn in inside if "dot_product_attention" in eqn.primitive.name]
    assert len(calls) == 2 and all(eqn.invars[0].aval.shape[0] == 2 for eqn in calls)
    compiled = vmem_jax.jit(step, budget="1GiB", sub_batches=4, batch_argnums=(1, 3))
    assert compiled.lower(*args).compile(target="h200").plan.sub_batches == 4


def test_a_sub_batch_stacks_its_own_part_of_a_mask():
    """The masks of dropped layers in a scan, which the backward scan reads."""
    captured, batch, _ = traced(SPLIT["layers in a scan"])
    split = captured.in_sub_batches(batch, 2)
    stacks = [
        v.aval
        for eqn in compat.open_jaxpr(split.flat).eqns
        if eqn.primitive.name == "scan"
        for v in eqn.outvars
    ]
    masks = [aval.shape for aval in stacks if aval.dtype == bool]
    assert masks and set(masks) == {(3, N // 2, WIDTH)}


def test_a_sub_batch_draws_its_own_part_of_a_padded_mask():
    captured, batch, _ = traced(SPLIT["dropout of padded rows"])
    eqns = compat.open_jaxpr(captured.in_sub_batches(batch, 2).flat).eqns
    drawn = [eqn.outvars[0].aval.shape for eqn in eqns if eqn.primitive.name == "random_part"]
    assert drawn == [(N // 2, WIDTH)]
