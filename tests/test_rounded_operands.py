"""Products that round their operands read them rounded, on a GPU: the same values, in less memory."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax.capture import rounded_operands
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.rounded_operands import with_operands_rounded
from vmem_jax.jax_compat import open_jaxpr

ROUNDS = lax.DotAlgorithmPreset.BF16_BF16_F32
HALF = lax.DotAlgorithmPreset.F16_F16_F32


def attention(w, x):
    """A layer whose scores and their gradient are in float32, as `jax.nn` has it."""
    q, k, v = jnp.split(x @ w, 3, -1)
    heads = lambda y: y.reshape(*y.shape[:-1], -1, 8)
    return x + jax.nn.dot_product_attention(heads(q), heads(k), heads(v)).reshape(x.shape)


def trained(layer, w, x):
    loss = lambda w: jnp.square(layer(w, x).astype(jnp.float32)).mean()
    return jax.grad(loss)(w)


def scanned(w, x):
    return lax.scan(lambda y, w: (attention(w, y), None), x, jnp.stack([w, w]))[0]


def product(precision, w, x):
    wide = jnp.sin(x.astype(jnp.float32))
    return lax.dot(wide, w.astype(jnp.float32)[:, :16], precision=precision)


# name -> (layer, dtype, how many values its products read rounded)
CASES = {
    "attention": (attention, jnp.bfloat16, 1),
    "in a loop": (scanned, jnp.bfloat16, 1),
    "both operands": (functools.partial(product, ROUNDS), jnp.float32, 3),
    "float16": (functools.partial(product, HALF), jnp.float32, 3),
    "not rounded": (functools.partial(product, None), jnp.float32, 0),
    "in float32": (functools.partial(product, lax.DotAlgorithmPreset.F32_F32_F32), jnp.float32, 0),
}


def given(dtype):
    draw = np.random.default_rng(0).normal
    return jnp.asarray(draw(0, 0.3, (16, 48)), dtype), jnp.asarray(draw(0, 1, (2, 8, 16)), dtype)


def flat_of(layer, dtype):
    w, x = given(dtype)
    x = x if layer in (attention, scanned) else x[0]
    return flatten(jax.make_jaxpr(functools.partial(trained, layer))(w, x)), (w, x)


def products(flat):
    """The products of a jaxpr and of the bodies of its loops, and how many values are rounded."""
    found, rounded = [], 0
    for eqn in open_jaxpr(flat).eqns:
        if eqn.primitive.name == "scan":
            inner, more = products(eqn.params["jaxpr"])
            found, rounded = found + inner, rounded + more
        if eqn.primitive.name == "dot_general":
            found.append(eqn)
        rounded += eqn.primitive.name == "convert_element_type" and (
            eqn.invars[0].aval.dtype == jnp.float32 and eqn.outvars[0].aval.dtype.itemsize == 2
        )
    return found, rounded


@pytest.mark.parametrize("name", CASES)
def test_what_is_rounded_is_rounded_once_and_where_it_is_made(name):
    layer, dtype, wanted = CASES[name]
    flat, args = flat_of(layer, dtype)
    found = with_operands_rounded(flat, "gpu")
    before, rounded = products(flat)
    after, now = products(found)
    assert now - rounded == wanted and len(before) == len(after)
    for eqn in after:
        if eqn.params["precision"] in (ROUNDS, HALF):
            assert {a.aval.dtype.itemsize for a in eqn.invars} == {2}
            assert eqn.outvars[0].aval.dtype == jnp.float32
    assert with_operands_rounded(flat, "cpu") is flat
    if name == "float16":  # the CPU has no such product
        return
    for a, b in zip(jaxpr_as_fun(found)(*args), jaxpr_as_fun(flat)(*args), strict=True):
        assert a.dtype == b.dtype
        tolerance = 0.02 if wanted else 0
        assert jnp.linalg.norm((a - b).astype(jnp.float32)) <= tolerance * jnp.linalg.norm(b)


@pytest.mark.gpu_compile
def test_a_gradient_of_scores_is_never_there_in_float32(monkeypatch):
    """The scores are kept in float32, 64 MiB. Their gradient would be so, too, but for its rounding,
    in place of 32 MiB, and what the softmax's gradient makes of it."""
    w = jax.ShapeDtypeStruct((512, 1536), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2, 1024, 512), jnp.bfloat16)

    def layer(w, x):
        q, k, v = jnp.split(x @ w, 3, -1)
        heads = lambda y: y.reshape(*y.shape[:-1], 8, 64)
        return jax.nn.dot_product_attention(heads(q), heads(k), heads(v)).reshape(x.shape)

    def compiled():
        step = vmem_jax.jit(functools.partial(trained, layer), budget="1GiB", policy="exact")
        made = step.lower(w, x).compile(target="h200")
        text = made.as_text()
        wide = r"= f32\[[\d,]*1024,(?:1,)?1024\]\S* (?:fusion|custom-call)\("
        return len(re.findall(wide, text[text.index("\nENTRY") :])), made.need_nbytes

    count, rounded = compiled()
    monkeypatch.setattr(rounded_operands, "_ROUNDED", {})
    more, wide = compiled()
    assert (count, more) == (1, 3) and rounded <= wide - 32 * 2**20
