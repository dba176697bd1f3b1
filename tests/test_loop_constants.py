"""What is the same in every iteration of a loop, and made of less in its body."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from built import needs_cuda
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture.capture import capture
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.loop_constants import with_constants_in_loops
from vmem_jax.capture.primitives import nbytes

LAYERS, TOKENS, HEADS, SIZE = 3, 8, 2, 4


def weights(layers=LAYERS, heads=HEADS, size=SIZE, dtype=jnp.float32):
    shapes = {"qkv": (3, heads * size, heads * size), "out": (heads * size, heads * size)}
    keys = iter(jax.random.split(jax.random.key(0), len(shapes)))
    draw = lambda shape: 0.3 * jax.random.normal(next(keys), (layers, *shape), dtype)
    return {name: draw(shape) for name, shape in shapes.items()}


def layer(x, w, heads, key):
    """Causal attention with dropout of its weights."""
    n, tokens, width = x.shape
    q, k, v = (y.reshape(n, tokens, heads, -1) for y in jnp.einsum("ntd,cde->cnte", x, w["qkv"]))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k).astype(jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
    shares = jax.nn.softmax(scores).astype(x.dtype)
    kept = jax.random.bernoulli(key, 0.9, shares.shape)
    shares = jnp.where(kept, shares / 0.9, 0).astype(x.dtype)
    return x + jnp.einsum("nhqk,nkhd->nqhd", shares, v).reshape(n, tokens, width) @ w["out"]


def step(w, x, heads=HEADS):
    """One of gradient descent, of layers in a scan."""

    def loss(w):
        keys = jax.random.split(jax.random.key(1), len(w["out"]))
        once = lambda x, given: (layer(x, given[0], heads, given[1]), None)
        return jnp.mean(jnp.square(lax.scan(once, x, (w, keys))[0].astype(jnp.float32)))

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), w, grads), value


def constants_nbytes(closed):
    """Bytes of the largest constant that a scan of `closed` reads."""
    scans = [e for e in compat.open_jaxpr(closed).eqns if e.primitive.name == "scan"]
    assert scans
    given = [a for e in scans for a in e.invars[: compat.scan_counts(e)[0]]]
    return max((nbytes(a.aval) for a in given), default=0)


def flat_of(f, *args):
    return flatten(jax.make_jaxpr(f)(*args))


def test_masks_and_numbers_are_made_in_the_body_and_the_results_are_the_same_to_the_bit():
    args = weights(), jax.random.normal(jax.random.key(2), (4, TOKENS, HEADS * SIZE))
    flat = flat_of(step, *args)
    inside = with_constants_in_loops(flat)
    a_score = 4 * HEADS * TOKENS**2
    assert constants_nbytes(flat) >= 4 * a_score  # the fill of what is masked, of every score
    assert constants_nbytes(inside) < a_score
    leaves = jax.tree.leaves(args)
    for ours, theirs in zip(
        jax.jit(jaxpr_as_fun(inside))(*leaves), jax.jit(jaxpr_as_fun(flat))(*leaves), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert with_constants_in_loops(inside) is inside


def test_the_body_of_a_loop_in_a_loop_makes_them():
    def nested(row, x):
        rows = jnp.broadcast_to(row, x.shape)
        inner = lambda c, _: (c + rows, None)
        outer = lambda c, _: (lax.scan(inner, c, None, length=3)[0], None)
        return lax.scan(outer, x, None, length=2)[0]

    args = jnp.arange(4.0), jnp.ones((64, 4))
    inside = with_constants_in_loops(flat_of(nested, *args))
    np.testing.assert_array_equal(jaxpr_as_fun(inside)(*args)[0], nested(*args))
    outer = compat.open_jaxpr(inside).eqns[-1]
    assert constants_nbytes(inside) == constants_nbytes(outer.params["jaxpr"]) == 4 * 4


def read_by(reader):
    """A scan that reads 64 rows of what is made of one, through `reader`."""

    def run(row, x):
        rows = jnp.broadcast_to(row, (64, len(row)))
        return lax.scan(lambda c, _: (reader(c, rows), None), x, None, length=3)[0]

    return flat_of(run, jnp.ones(64), jnp.ones((64, 64)))


def test_what_a_product_reads_stays_outside_unless_it_is_made_of_nothing():
    whole = 4 * 64 * 64
    given = lambda flat: constants_nbytes(with_constants_in_loops(flat))
    assert given(read_by(lambda c, rows: c @ rows)) == whole
    assert given(read_by(lambda c, rows: c @ rows.T)) == whole
    assert given(read_by(lambda c, rows: c @ (c + rows))) == 4 * 64

    def of_a_number(x):
        ones = jnp.ones((64, 64))
        return lax.scan(lambda c, _: (c @ ones, None), x, None, length=3)[0]

    assert given(flat_of(of_a_number, jnp.ones((64, 64)))) == 0


def test_they_take_no_memory_beside_a_loop():
    args = weights(), jnp.ones((4, TOKENS, HEADS * SIZE))
    program = capture(jax.make_jaxpr(step)(*args)).program
    made = {b for s in program.steps if s.op == "broadcast_in_dim" for b in s.writes}
    assert all(program.buffers[b].nbytes < 4 * HEADS * TOKENS**2 for b in made)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("parts", [None, 4])
def test_the_need_of_a_described_card_is_that_of_scanned_attention(parts):
    needs_cuda()
    w = jax.eval_shape(functools.partial(weights, 4, 16, 64, jnp.bfloat16))
    x = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)
    how = {"policy": "exact", "sub_batches": parts, "budget": "100GiB", "donate_argnums": 0}
    made = vmem_jax.jit(functools.partial(step, heads=16), **how).lower(w, x)
    made = made.compile(target="h200")
    assert made.attempts[-1].predicted_need == pytest.approx(made.need_nbytes, rel=0.03)
