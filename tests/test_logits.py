"""The end of a step around its logits, in chunks of tokens: what is found, its values, its peak."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.logits import Tail, find_tail
from vmem_jax.core.plan import Plan
from vmem_jax.rewrite.logits import in_chunks

SEQUENCES, TOKENS, WIDTH, VOCABULARY = 6, 20, 32, 512


def integer_labels(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def one_hot(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1])).mean()


def by_hand(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def masked(logits, labels):
    """The mean over the tokens that are no padding; their number is a sum over all."""
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    mask = labels > 3
    return (losses * mask).sum() / mask.sum()


def step_of(
    loss_of, dtype="float32", flat=False, tied=False, weights_first=False, tokens_first=False
):
    def step(params, x, labels):
        def loss(params):
            turned = (lambda y: y.swapaxes(0, 1)) if tokens_first else (lambda y: y)
            h = turned(jnp.tanh(turned(x) @ params["layer"]).astype(dtype))
            head = params["head"].T if tied else params["head"]
            if flat:
                h, targets = h.reshape(-1, WIDTH), labels.reshape(-1)
            else:
                targets = labels
            if weights_first:  # the product is transposed behind
                logits = jnp.einsum("dv,...d->...v", head.astype(dtype), h).astype(jnp.float32)
            else:
                logits = (h @ head.astype(dtype)).astype(jnp.float32)
            return loss_of(logits, targets)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments(tied=False, vocabulary=VOCABULARY):
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (vocabulary, WIDTH) if tied else (WIDTH, vocabulary)
    params = {
        "layer": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 5,
        "head": jax.random.normal(keys[1], shape) / 5,
    }
    x = jax.random.normal(keys[2], (SEQUENCES, TOKENS, WIDTH))
    return params, x, jax.random.randint(keys[3], (SEQUENCES, TOKENS), 0, vocabulary)


def found_in(step, *args):
    flat = capture(jax.jit(step).trace(*args).jaxpr).separate
    return flat, find_tail(flat)


def as_large(jaxpr, size):
    """The shapes of values of `size` elements or more, in loops, too."""
    shapes = []
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        shapes += [v.aval.shape for v in eqn.outvars if np.prod(v.aval.shape) >= size]
        if eqn.primitive.name == "scan":
            shapes += as_large(eqn.params["jaxpr"], size)
    return shapes


@pytest.mark.parametrize("loss_of", [integer_labels, one_hot, by_hand, masked])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dtype": "bfloat16"},
        {"flat": True},
        {"tied": True},
        {"weights_first": True},
        {"tokens_first": True},
    ],
    ids=str,
)
def test_chunks_give_the_loss_and_gradients_of_all_tokens(loss_of, how):
    step, args = step_of(loss_of, **how), arguments(how.get("tied", False))
    flat, tail = found_in(step, *args)
    assert isinstance(tail, Tail)
    expected = jax.tree.leaves(jax.jit(step)(*args))
    logits = SEQUENCES * TOKENS * VOCABULARY
    assert as_large(flat, logits)
    for count in (4, 3):  # 3 is no divisor of 20: the last chunk is smaller
        chunked = in_chunks(flat, tail, count)
        assert not as_large(chunked, logits)
        results = jax.jit(jaxpr_as_fun(chunked))(*jax.tree.leaves(args))
        tolerance = 2e-3 if how.get("dtype") else 1e-5
        for a, b in zip(results, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_the_gradient_of_the_head_is_summed_in_float32_as_it_is_read():
    flat, tail = found_in(step_of(integer_labels, "bfloat16"), *arguments())
    [loop] = [
        eqn
        for eqn in compat.open_jaxpr(in_chunks(flat, tail, 4)).eqns
        if eqn.primitive.name == "scan"
    ]
    sums = {v.aval.dtype for v in loop.outvars if v.aval.shape == (WIDTH, VOCABULARY)}
    assert sums == {np.dtype("float32")}


@pytest.mark.parametrize("read_again", [False, True])
def test_chunks_of_transposed_hidden_values_are_transposed_one_by_one(read_again):
    """As a recurrent network has them, token by token; unless something else reads all of them."""
    made = step_of(integer_labels, tokens_first=True)

    def step(params, x, labels):
        new, value = made(params, x, labels)
        h = jnp.tanh(x.swapaxes(0, 1) @ params["layer"]).swapaxes(0, 1)
        return new, value, h[0] if read_again else 0.0

    flat, tail = found_in(step, *arguments())
    assert isinstance(tail, Tail) and tail.size == TOKENS
    found = [
        eqn.outvars[0].aval.shape
        for eqn in compat.open_jaxpr(in_chunks(flat, tail, 4)).eqns
        if eqn.primitive.name == "transpose" and len(eqn.outvars[0].aval.shape) == 3
    ]
    by_token = TOKENS, SEQUENCES, WIDTH
    by_sequence = SEQUENCES, TOKENS, WIDTH
    assert sorted(found) == ([by_sequence, by_token, by_token] if read_again else [by_token])


def test_half_as_many_words_again_as_hidden_values_have_a_tail():
    params, x, labels = arguments(vocabulary=3 * WIDTH // 2)
    _, tail = found_in(step_of(integer_labels), params, x, labels)
    assert isinstance(tail, Tail) and tail.nbytes == SEQUENCES * TOKENS * 3 * WIDTH // 2 * 4


def test_why_there_is_no_tail():
    params, x, labels = arguments()
    small = {"layer": params["layer"], "head": params["head"][:, :8]}
    _, why = found_in(step_of(integer_labels), small, x, labels % 8)
    assert isinstance(why, str) and "a third more" in why

    def contrastive(logits, labels):  # a softmax over all tokens and words
        return -jax.nn.log_softmax(logits.reshape(-1))[labels[0, 0]]

    _, why = found_in(step_of(contrastive), params, x, labels)
    assert isinstance(why, str) and "all tokens" in why

    def returned(params, x, labels):
        def loss(params):
            logits = jnp.tanh(x @ params["layer"]) @ params["head"]
            return integer_labels(logits, labels), logits

        return jax.value_and_grad(loss, has_aux=True)(params)

    _, why = found_in(returned, params, x, labels)
    assert isinstance(why, str) and "as a whole" in why


def test_a_plan_chooses_chunks_and_is_loaded_again(tmp_path):
    args = arguments(vocabulary=16_384)
    step = step_of(integer_labels)
    whole = vmem_jax.lowest(step, *args, donate_argnums=0, allow=("order", "recompute"))
    budget = int(0.8 * whole.nbytes)
    with pytest.raises(vmem_jax.BudgetError):
        vmem_jax.jit(step, budget=budget, donate_argnums=0, allow=("order", "recompute"))(*args)
    allow = ("order", "recompute", "logits")
    chunked = vmem_jax.jit(step, budget=budget, donate_argnums=0, allow=allow)
    plan = chunked.plan(*args)
    assert plan.logit_chunks > 1 and "logits in" in str(plan)
    compiled = chunked.lower(*args).compile()
    assert compiled.need_nbytes <= budget
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    again = vmem_jax.jit(step, plan=loaded, donate_argnums=0)
    expected = jax.jit(step)(*args)
    copy = lambda: jax.tree.map(jnp.copy, args)
    for budgeted in (chunked, again):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
            budgeted(*copy()),
            expected,
        )


@pytest.mark.gpu_compile
def test_the_peak_on_a_gpu_loses_the_logits():
    """Of 250 MiB of logits, for which there is a sum of 63 MiB."""
    wide, vocabulary = 512, 32_000

    def step(params, x, labels):
        def loss(params):
            h = x.astype(jnp.bfloat16)
            for w in params["layers"]:
                h = jnp.tanh(h @ w.astype(jnp.bfloat16))
            logits = (h @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
            return integer_labels(logits, labels)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shape = lambda *s: jax.ShapeDtypeStruct(s, "float32")
    params = {"layers": [shape(wide, wide)] * 4, "head": shape(wide, vocabulary)}
    args = params, shape(4, 1024, wide), jax.ShapeDtypeStruct((4, 1024), "int32")
    logits = 4 * 1024 * vocabulary * 2
    needs = {}
    for allow in (("order", "recompute"), ("order", "recompute", "logits")):
        found = vmem_jax.lowest(step, *args, donate_argnums=0, allow=allow, target="h200")
        needs[allow[-1]] = found.nbytes
    assert needs["logits"] < needs["recompute"] - logits / 2
