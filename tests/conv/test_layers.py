"""Which convolutions a step has, and how often."""

import jax
import jax.numpy as jnp
from jax import lax

from vmem_jax.conv.layers import convolutions_of
from vmem_jax.core.convolution import Pass

X, W = jnp.zeros((4, 6, 6, 8)), jnp.zeros((3, 3, 8, 8))


def conv(x, w, **kwargs):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, **kwargs)


def test_equal_layers_are_one_convolution():
    def loss(ws, x):
        for w in ws:
            x = conv(x, w)
        return x.sum()

    found = convolutions_of(jax.make_jaxpr(jax.grad(loss))([W, W, W], X))
    counts = {c.which: n for c, n in found.items()}
    assert counts == {Pass.FORWARD: 3, Pass.BACKWARD_FILTER: 3, Pass.BACKWARD_DATA: 2}
    assert len(found) == 3 and {c.batch for c in found} == {4}


def test_inside_of_loops_once():
    def step(x, w):
        return lax.scan(lambda x, _: (conv(x, w), None), x, length=5)[0]

    [(convolution, count)] = convolutions_of(jax.make_jaxpr(jax.jit(step))(X, W)).items()
    assert count == 1 and convolution.which is Pass.FORWARD


def test_others_are_not_there():
    def step(x, w):
        return conv(x.astype(jnp.int32), w.astype(jnp.int32)).sum() + (x @ w[0, 0]).sum()

    assert not convolutions_of(jax.make_jaxpr(step)(X, W))
