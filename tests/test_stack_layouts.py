"""Loops stack values as the products of the loops behind them read them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.stack_layouts import made_order, read_order, with_stack_layouts
from vmem_jax.models.decoder import Decoder, train_step

LAYERS, BATCH, TOKENS, KEYS, QUERIES, SIZE = 3, 2, 16, 2, 4, 8


def grouped(x, w):
    """Attention of `QUERIES` queries to a key; the weights are [query, batch, key head, t, t]."""
    q = (x @ w).reshape(BATCH, TOKENS, KEYS, QUERIES, SIZE)
    k = x.reshape(BATCH, TOKENS, KEYS, QUERIES, SIZE).mean(3)
    weights = jax.nn.softmax(jnp.einsum("btkgd,bskd->gbkts", q, k))
    return x + jnp.einsum("gbkts,bskd->btkgd", weights, k).reshape(x.shape)


def plain(x, w):
    return jnp.tanh(x @ w)


def gradient(layer):
    """A flat jaxpr of the gradient of layers in a loop, and its arguments."""
    loss = lambda ws, x: lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].sum()
    width = KEYS * QUERIES * SIZE
    keys = jax.random.split(jax.random.key(0))
    ws = jax.random.normal(keys[0], (LAYERS, width, width)) / 8
    x = jax.random.normal(keys[1], (BATCH, TOKENS, width))
    return flatten(jax.jit(jax.grad(loss, (0, 1))).trace(ws, x).jaxpr), (ws, x)


def loops(flat):
    return [eqn for eqn in compat.open_jaxpr(flat).eqns if eqn.primitive.name == "scan"]


def stated(eqn):
    eqns = compat.open_jaxpr(eqn.params["jaxpr"]).eqns
    return sum(eqn.primitive.name == "layout_constraint" for eqn in eqns)


def test_both_loops_state_how_a_stack_lies():
    flat, args = gradient(grouped)
    made = with_stack_layouts(flat, "gpu")
    forward, backward = map(stated, loops(made))
    assert forward == backward > 0
    compat.check_jaxpr(made)
    for ours, theirs in zip(jaxpr_as_fun(made)(*args), jaxpr_as_fun(flat)(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_weights_lie_as_the_product_that_sums_over_queries_reads_them():
    flat, _ = gradient(grouped)
    [v] = [
        v
        for v in loops(with_stack_layouts(flat, "gpu"))[0].outvars
        if v.aval.shape == (LAYERS, BATCH, KEYS, QUERIES, TOKENS, TOKENS)
    ]
    assert v.aval.dtype == "float32"


@pytest.mark.parametrize(("layer", "platform"), [(plain, "gpu"), (grouped, "cpu")])
def test_nothing_is_stated_where_xla_agrees_with_itself(layer, platform):
    flat, _ = gradient(layer)
    assert not any(map(stated, loops(with_stack_layouts(flat, platform))))


def orders(read, make, *shapes):
    """Of the product `read` the order of its first operand, and of `make` that of its result."""
    zeros = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    reader = compat.open_jaxpr(jax.make_jaxpr(read)(*zeros))
    maker = compat.open_jaxpr(jax.make_jaxpr(make)(*zeros))
    return read_order(reader, reader.invars[0]), made_order(maker, maker.outvars[0])


def test_orders_are_followed_through_what_keeps_the_dimensions():
    read = lambda x, y: lax.dot_general(jnp.exp(x).T, y, (((0,), (0,)), ((), ())))
    make = lambda x, y: jnp.exp((y @ x).T)
    assert orders(read, make, (2, 3), (3, 2)) == ((0, 1), (1, 0))


def test_a_product_that_reads_the_value_itself_comes_first():
    def read(x, y):
        later = jnp.einsum("ab,ab->a", jnp.exp(x), y)
        return later, jnp.einsum("ab,ab->b", x, y)

    assert orders(read, lambda x, y: x + y, (2, 3), (2, 3)) == ((1, 0), None)


@pytest.mark.gpu_compile
def test_no_stack_of_attention_weights_is_copied():
    """XLA would copy those of grouped queries between the loops."""
    shape = {"layers": 6, "width": 512, "hidden": 512, "heads": 8, "kv_heads": 2}
    model = Decoder(**shape, vocabulary=512, attention="xla")
    optimiser = optax.sgd(1e-3)
    params = jax.eval_shape(model.init, jax.random.key(0))
    state = params, jax.eval_shape(optimiser.init, params)
    tokens = jax.ShapeDtypeStruct((4, 1025), jnp.int32)
    step = vmem_jax.jit(train_step(model, optimiser), policy="exact", budget=1.0, donate_argnums=0)
    made = step.lower(state, tokens).compile(target="h200")
    assert re.search(r"bf16\[6,4,2,4,1024,1024\]", made.as_text())  # it stacks them
    assert made.need_nbytes < 1.03 * made.attempts[-1].predicted_need
