"""Values that XLA transposes in passes of their own, for the batched products of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.program import Phase

SAMPLES, TOKENS, HEADS, SIZE = 64, 197, 16, 64
WIDTH = HEADS * SIZE
ONE = SAMPLES * TOKENS * WIDTH * 2  # bytes of queries, keys or values


def of(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def steps(call, *shapes, platform="gpu"):
    return capture(jax.jit(call).trace(*shapes).jaxpr, platform=platform).program.steps


def in_a_loop(call, *shapes, platform="gpu"):
    """The steps of an iteration, which XLA transposes for as it likes."""
    loop = lambda *args: jax.lax.scan(lambda i, _: (i, call(*args)), 0, None, length=2)
    found = steps(loop, *shapes, platform=platform)
    return next(step.body for step in found if step.body)


def transposed(call, *shapes, platform="gpu", of=steps):
    """Bytes by the operation that makes what is transposed."""
    found = of(call, *shapes, platform=platform)
    return {step.op: step.behind for step in found if step.behind}


def attended(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhqk", q, k).astype("float32"))
    return jnp.einsum("nhqk,nkhd->nqhd", weights.astype(v.dtype), v)


def attention(x, qkv, out):
    heads = (x @ qkv).reshape(*x.shape[:2], 3, HEADS, SIZE)
    q, k, v = jnp.unstack(heads, axis=2)
    return attended(q, k, v).reshape(x.shape) @ out


GIVEN = of(SAMPLES, TOKENS, WIDTH), of(WIDTH, 3 * WIDTH), of(WIDTH, WIDTH)


def test_heads_are_transposed_between_products():
    found = transposed(attention, *GIVEN, of=in_a_loop)
    assert sum(found.values()) == 2 * 4 * ONE  # queries, keys, values; what is attended
    assert found["dot_general"] == 2 * ONE
    # elsewhere the first three are cut out as they are read (`whole_rows`)
    assert transposed(attention, *GIVEN) == {"dot_general": 2 * ONE}


def test_gradients_to_heads_are_transposed_before_they_are_put_together():
    loss = lambda *args: attention(*args).astype("float32").sum()
    found = in_a_loop(jax.value_and_grad(loss, (0, 1, 2)), *GIVEN)
    # four forwards, and backwards what is attended, its cotangent twice, and three gradients
    assert sum(step.behind for step in found) == 2 * 10 * ONE


def test_a_sum_of_a_gradient_does_not_transpose_it():
    """As that to the bias of the values. Two products read the gradient, each in its own order."""

    def loss(x, qkv, bias, out):
        q, k, v = (jnp.einsum("nti,ihd->nthd", x, w) + b for w, b in zip(qkv, bias, strict=True))
        return (attended(q, k, v).reshape(x.shape) @ out).astype("float32").sum()

    given = GIVEN[0], of(3, WIDTH, HEADS, SIZE), of(3, HEADS, SIZE), GIVEN[2]
    found = in_a_loop(jax.grad(loss, (0, 1, 2, 3)), *given)
    of_values = [s for s in found if s.phase is Phase.BACKWARD and s.batched and s.behind]
    assert {s.behind for s in of_values} == {2 * 2 * ONE}


def test_a_chain_transposes_where_it_computes():
    scaled = lambda x: x * jnp.bfloat16(0.125)

    def call(x, qkv, out):
        heads = (x @ qkv).reshape(*x.shape[:2], 3, HEADS, SIZE)
        q, k, v = map(scaled, jnp.unstack(heads, axis=2))
        return scaled(attended(q, k, v)).reshape(x.shape) @ out

    assert transposed(call, *GIVEN) == {}


def test_what_a_batch_leads_or_parts_is_read_as_it_lies():
    def call(x, y):  # the batch first, and between rows and columns
        first = jnp.einsum("bij,bjk->bik", x @ x, y @ y)
        return jnp.einsum("ibj,jbk->bik", y @ y, x @ x), first

    assert transposed(call, of(128, 128, 128), of(128, 128, 128)) == {}


def test_cpu_has_no_such_passes():
    assert transposed(attention, *GIVEN, platform="cpu") == {}


@pytest.mark.parametrize("tokens", [196, 197, 200])
def test_rows_that_are_no_vectors_take_longer(tokens):
    given = of(SAMPLES, tokens, WIDTH), *GIVEN[1:]
    [cut] = [s for s in in_a_loop(attention, *given) if s.behind and s.op != "dot_general"][:1]
    assert cut.behind_aligned == (tokens % 8 == 0)
    machine = CARDS["h200"].machine
    taken = machine.seconds(cut) - cut.nbytes / machine.bandwidth - machine.launch
    once = cut.behind / machine.bandwidth
    assert taken == pytest.approx(once if tokens % 8 == 0 else 1.35 * once)


# microseconds on an H200 (JAX 0.11.2), of kernels in the steps of ViT-L and GPT-2
CUT = 51.5 + 3 * 13.1  # queries, keys and values are transposed, then copied
SCORES = {(64, 197): 62.4, (8, 1024): 77.0}


def test_cutting_heads_out_takes_what_the_card_took():
    cut = [s for s in in_a_loop(attention, *GIVEN) if s.behind and s.op != "dot_general"]
    taken = sum(map(CARDS["h200"].machine.seconds, cut))
    assert 1e6 * taken == pytest.approx(CUT, rel=0.1)


@pytest.mark.parametrize(("samples", "tokens"), SCORES)
def test_scores_take_what_the_card_took(samples, tokens):
    found = in_a_loop(attention, of(samples, tokens, WIDTH), *GIVEN[1:])
    scores = next(step for step in found if step.batched)
    taken = 1e6 * CARDS["h200"].machine.seconds(scores)
    assert taken == pytest.approx(SCORES[samples, tokens], rel=0.1)
