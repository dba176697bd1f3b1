"""Softmaxes of rows that are not aligned are computed of padded rows, and give the same."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.padded_rows import padded_length, with_padded_rows
from vmem_jax.capture.paddings import Held, held_by
from vmem_jax.capture.unpadded import as_unpadded
from vmem_jax.core.cards import machine_for
from vmem_jax.core.costs import analytic

N, H, T, D = 2, 3, 13, 4
"""Of 13 tokens, which are padded to 16."""


def scores_of(q, k):
    return jnp.einsum("nqhd,nkhd->nhqk", q, k).astype(jnp.float32) / 3


def weighed(weights, v):
    return jnp.einsum("nhqk,nkhd->nqhd", weights.astype(v.dtype), v)


def attention(q, k, v, more):
    return weighed(jax.nn.softmax(scores_of(q, k)), v)


def heads_first(q, k, v, more):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    weights = jax.nn.softmax(q @ k.swapaxes(2, 3))
    return (weights @ v).swapaxes(1, 2)


def causal(q, k, v, more):
    seen = jnp.tril(jnp.ones((T, T), bool))
    return weighed(jax.nn.softmax(jnp.where(seen, scores_of(q, k), -jnp.inf)), v)


def dropped(q, k, v, more):
    kept = jax.random.bernoulli(more["key"], 0.9, (N, H, T, T))
    weights = jax.nn.softmax(scores_of(q, k)).astype(q.dtype)
    return weighed(jnp.where(kept, weights / 0.9, 0), v)


def given_mask(q, k, v, more):
    """One mask for all heads of a sample, and a row of it that lets nothing through."""
    mask = more["mask"].at[0, 3].set(False)
    scores = jnp.where(mask[:, None], scores_of(q, k), jnp.finfo(jnp.float32).min)
    return weighed(jax.nn.softmax(scores), v)


def segments(q, k, v, more):
    same = more["segments"][:, :, None] == more["segments"][:, None]
    return weighed(jax.nn.softmax(jnp.where(same[:, None], scores_of(q, k), -1e9)), v)


def biased(q, k, v, more):
    """With a bias that is trained, whose gradient is summed over samples."""
    return weighed(jax.nn.softmax(scores_of(q, k) + more["bias"]), v)


def capped(q, k, v, more):
    scores = 5 * jnp.tanh(scores_of(q, k) / 5)
    return weighed(jax.nn.softmax(scores), v)


def shifted(q, k, v, more):
    """Of windows, some of which are masked: rows are reshaped on the way (Swin)."""
    scores = scores_of(q, k).reshape(1, N, H, T, T) + more["shift"][:, None]
    return weighed(jax.nn.softmax(scores.reshape(N, H, T, T)), v)


def with_logsumexp(q, k, v, more):
    scores = scores_of(q, k)
    z = jax.nn.logsumexp(scores, axis=-1)
    return weighed(jax.nn.softmax(scores), v) + z.transpose(0, 2, 1)[..., None]


def weights_twice(q, k, v, more):
    """A product and a sum over samples read the weights."""
    weights = jax.nn.softmax(scores_of(q, k))
    return weighed(weights, v) * weights.sum((0, 1))[None, :, :1, None]


def by_jax(q, k, v, more):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def talking(q, k, v, more):
    """A product over heads makes rows again, behind the softmax."""
    weights = jax.nn.softmax(scores_of(q, k))
    return weighed(jnp.einsum("nhqk,hg->ngqk", weights, more["mix"]), v)


PADDED = [attention, heads_first, causal, dropped, given_mask, segments, biased, capped, shifted]
PADDED += [with_logsumexp, weights_twice, by_jax]


def returned(q, k, v, more):
    """The caller reads the weights, too."""
    weights = jax.nn.softmax(scores_of(q, k))
    return weighed(weights, v).sum() + jnp.sort(weights, axis=-1)[..., 0].sum()


def with_itself(q, k, v, more):
    """Rows are added to columns."""
    scores = scores_of(q, k)
    return weighed(jax.nn.softmax(scores + scores.swapaxes(2, 3)), v)


def arguments(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 8)
    heads = [jax.random.normal(key, (N, T, H, D), dtype) for key in keys[:3]]
    more = {
        "key": jax.random.key(7),
        "mask": jax.random.bernoulli(keys[3], 0.7, (N, T, T)),
        "segments": jax.random.randint(keys[4], (N, T), 0, 3),
        "bias": jax.random.normal(keys[5], (H, T, T)),
        "shift": jnp.where(jax.random.bernoulli(keys[6], 0.5, (N, T, T)), -100.0, 0.0),
        "mix": jax.random.normal(keys[7], (H, H)),
    }
    return (*heads, more)


def gradients(function):
    def step(q, k, v, more):
        def loss(q, k, v, bias):
            return jnp.sin(function(q, k, v, {**more, "bias": bias})).sum()

        return jax.value_and_grad(loss, (0, 1, 2, 3))(q, k, v, more["bias"])

    return step


def flat_of(function, given):
    return flatten(jax.jit(gradients(function)).trace(*given).jaxpr)


def rows_of(flat, length):
    """Values whose rows have so many elements."""
    shapes = [v.aval.shape for eqn in flat.jaxpr.eqns for v in eqn.outvars]
    return [s for s in shapes if len(s) == 4 and s[-2:] == (T, length)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("function", PADDED)
def test_padded_rows_give_the_same(function, dtype):
    given = arguments(dtype)
    flat = flat_of(function, given)
    padded, lengths = with_padded_rows(flat, "gpu")
    assert set(lengths.values()) == {T} and rows_of(padded, 16)
    leaves = jax.tree.leaves(given)
    rtol = 1e-5 if dtype == jnp.float32 else 0.05
    before, after = (jaxpr_as_fun(each)(*leaves) for each in (flat, padded))
    for a, b in zip(before, after, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol, rtol * max(1.0, np.nanmax(np.abs(a))))


def by_label(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)


def by_index(logits, labels):
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels] * (labels != 3)


def one_hot(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))


LOSSES = [optax.softmax_cross_entropy_with_integer_labels, by_label, by_index, one_hot]


def classifying(loss, words, samples=64):
    """A step of a classifier, which says what it takes each sample for, and its arguments."""

    def step(w, head, x, labels):
        def mean(w, head):
            logits = (jnp.tanh(x @ w) @ head).astype(jnp.float32)
            return loss(logits, labels).mean(), logits.argmax(-1)

        return jax.value_and_grad(mean, (0, 1), has_aux=True)(w, head)

    keys = jax.random.split(jax.random.key(0), 4)
    draw = jax.random.normal
    labels = jax.random.randint(keys[3], (samples,), 0, words)
    return step, (
        draw(keys[0], (8, 8)),
        draw(keys[1], (8, words)),
        draw(keys[2], (samples, 8)),
        labels,
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_words_are_padded_and_losses_and_gradients_are_the_same(loss):
    step, given = classifying(loss, 27)
    flat = flatten(jax.jit(step).trace(*given).jaxpr)
    padded, lengths = with_padded_rows(flat, "gpu")
    assert lengths[64, 32] == 27
    left = {e.primitive.name for e in padded.jaxpr.eqns if e.outvars[0].aval.shape == (64, 27)}
    assert left <= {"slice"}  # behind which a label is picked
    before, after = (jaxpr_as_fun(each)(*given) for each in (flat, padded))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_labels_that_are_no_words_stay_wrong():
    """JAX picks nothing there, which makes the loss NaN; the padding is no word either."""
    step, (*given, labels) = classifying(by_label, 27)
    given = (*given, labels.at[5].set(29))
    flat = flatten(jax.jit(step).trace(*given).jaxpr)
    padded, _ = with_padded_rows(flat, "gpu")
    before, after = (jaxpr_as_fun(each)(*given) for each in (flat, padded))
    assert np.isnan(before[0])
    np.testing.assert_array_equal(before[0], after[0])


@pytest.mark.parametrize(("words", "samples"), [(32, 64), (27, 15)])
def test_heads_of_aligned_words_or_few_samples_stay(words, samples):
    step, given = classifying(by_label, words, samples)
    flat = flatten(jax.jit(step).trace(*given).jaxpr)
    assert with_padded_rows(flat, "gpu") == (flat, {})


def layers_of(function):
    """Several layers, which share what is not of their own: zeros, masks."""

    def step(q, k, v, more):
        for i in range(20):
            key = jax.random.fold_in(more["key"], i)
            q = jnp.sin(function(q, k, v, {**more, "key": key}))
        return q

    return step


@pytest.mark.parametrize("function", [dropped, causal, given_mask, biased])
def test_each_layer_is_padded(function):
    padded, _ = with_padded_rows(flat_of(layers_of(function), arguments()), "gpu")
    exps = [e.outvars[0].aval.shape for e in padded.jaxpr.eqns if e.primitive.name == "exp"]
    assert len(exps) == 20 and {*exps} == {(N, H, T, 16)}


@pytest.mark.parametrize("function", PADDED)
def test_no_row_is_left_and_one_mask_is_enough(function):
    padded, _ = with_padded_rows(flat_of(function, arguments()), "gpu")
    left = [s for s in rows_of(padded, T) if s[:2] == (N, H)]
    assert not left or function is dropped  # of which random words are left
    iotas = (eqn.params for eqn in padded.jaxpr.eqns if eqn.primitive.name == "iota")
    places = [p for p in iotas if p["shape"][-4:] == (N, H, T, 16)]
    assert sum(p["dimension"] == len(p["shape"]) - 1 for p in places) == 1


@pytest.mark.parametrize("function", [returned, with_itself, talking])
def test_rows_that_something_else_reads_stay(function):
    flat = flat_of(function, arguments())
    assert with_padded_rows(flat, "gpu") == (flat, {})


def test_rows_that_a_reshape_divides_a_product_into():
    def forward(x, w, v):
        rows = (x @ w).reshape(*x.shape[:-1], 2, T)
        return jnp.einsum("nqge,ed->nqd", jax.nn.softmax(rows), v)

    keys = jax.random.split(jax.random.key(0), 3)
    given = [
        jax.random.normal(*of) for of in zip(keys, ((N, 8, D), (D, 2 * T), (T, D)), strict=True)
    ]
    flat = flatten(jax.jit(forward).trace(*given).jaxpr)
    padded, _ = with_padded_rows(flat, "gpu")
    for a, b in zip(jaxpr_as_fun(flat)(*given), jaxpr_as_fun(padded)(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_keys_that_are_as_large_as_scores_stay():
    """Windows of few tokens, as Swin has them."""
    q, k, v, more = arguments()
    wide = [jnp.concatenate([x, x], -1) for x in (q, k, v)]
    flat = flat_of(attention, (*wide, more))
    assert with_padded_rows(flat, "gpu") == (flat, {})


@pytest.mark.parametrize("platform", ["cpu", ""])
def test_only_gpus_change(platform):
    flat = flat_of(attention, arguments())
    assert with_padded_rows(flat, platform) == (flat, {})


def test_padded_lengths():
    """197 tokens of a ViT-L/16, 257 of a ViT-L/14, and 50,257 words of GPT-2."""
    lengths = {197: 200, 257: 264, 12: 16, 50257: 50432}
    assert {n: padded_length(n) for n in lengths} == lengths
    assert not any(map(padded_length, (1, 8, 200, 1024, 50304)))


def nan_of_infinity(q, k, v, more):
    return attention(q.at[0, 0, 0, 0].set(jnp.inf), k, v, more)


def test_what_is_not_finite_stays_so():
    given = arguments()
    flat = flat_of(nan_of_infinity, given)
    padded, lengths = with_padded_rows(flat, "gpu")
    assert lengths
    leaves = jax.tree.leaves(given)
    before, after = (jaxpr_as_fun(each)(*leaves) for each in (flat, padded))
    assert not all(np.isfinite(a).all() for a in before)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))


Z, L, R, F, A = Held


@pytest.mark.parametrize(
    ("function", "operands", "held"),
    [
        (jnp.exp, [L], Z),
        (jnp.exp, [Z], A),
        (jnp.exp, [R], R),
        (jnp.subtract, [L, R], L),
        (jnp.subtract, [Z, Z], Z),
        (jnp.subtract, [Z, R], F),
        (jnp.multiply, [Z, F], Z),
        (jnp.multiply, [Z, L], A),
        (jnp.multiply, [Z, A], A),
        (jnp.divide, [Z, R], Z),
        (jnp.divide, [Z, F], A),
        (jnp.divide, [F, Z], A),
        (jnp.add, [L, F], L),
        (jnp.add, [L, L], A),
        (jnp.negative, [L], A),
        (jnp.tanh, [Z], Z),
        (jnp.log, [F], A),
        (jnp.cos, [Z], F),
    ],
)
def test_what_padding_holds(function, operands, held):
    given = [jax.ShapeDtypeStruct((4, 16), jnp.float32)] * len(operands)
    eqns = flatten(jax.make_jaxpr(function)(*given)).jaxpr.eqns
    assert held_by(eqns[-1], operands) is held


def test_plain_jit_takes_longer_for_such_rows():
    """For two products forwards and four backwards; for maxima, sums, weights, and their gradient."""
    heads = jax.ShapeDtypeStruct((64, 197, 16, 64), jnp.bfloat16)
    step = jax.jit(jax.grad(lambda *given: jnp.sin(attention(*given, {})).sum(), (0, 1, 2)))
    found = capture(step.trace(heads, heads, heads).jaxpr, platform="gpu")
    machine = machine_for("h200")
    costs = analytic(found.program, machine)
    known = found.flat.jaxpr.eqns, found.variables, found.written.lengths
    plain, program = as_unpadded(costs, found.program, *known, machine)
    each = zip(found.program.steps, costs.seconds, plain.seconds, strict=True)
    longer = [
        (step.op == "dot_general", after / before)
        for step, before, after in each
        if after != before
    ]
    assert sum(product for product, _ in longer) == 6
    assert sum(not product for product, _ in longer) == 5
    assert all(more == pytest.approx(2.0, rel=0.1) for product, more in longer if product)
    assert all(0.98 < more < 1.7 for product, more in longer if not product)
    assert not any(step.aligned for step in program.steps if step.batched)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("dropout", [False, True])
def test_a_gpu_reads_and_makes_padded_rows(dropout):
    """The scores, the weights, both gradients; and a mask, of which the words are not padded."""
    n, t, h, d = 8, 197, 4, 64

    def loss(q, k, v, key):
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k).astype(jnp.float32) / 8
        weights = jax.nn.softmax(scores).astype(q.dtype)
        kept = jax.random.bernoulli(key, 0.9, weights.shape)
        weights = jnp.where(kept, weights / 0.9, 0) if dropout else weights
        return jnp.sin(jnp.einsum("nhqk,nkhd->nqhd", weights, v).astype(jnp.float32)).sum()

    heads = jax.ShapeDtypeStruct((n, t, h, d), jnp.bfloat16)
    step = vmem_jax.jit(jax.grad(loss, (0, 1, 2)), budget="1GiB", policy="exact")
    key = jax.eval_shape(lambda: jax.random.key(0))
    text = step.lower(heads, heads, heads, key).compile(target="h200").as_text()
    entry = text[text.index("ENTRY") :]
    made = " ".join(re.findall(r"= (.*?) (?:fusion|custom-call)\(", entry))
    shapes = lambda length: (
        f"{n},{h},{t},{length}",
        f"{n * h},{t},{length}",
        f"{n * h * t * length}",
    )
    of = lambda dtype, length: sum(made.count(f"{dtype}[{shape}]") for shape in shapes(length))
    assert of("bf16", 200) == 4 and of("pred", 200) == dropout
    assert not of("bf16", t) and not of("pred", t) and not of("u32", t)
