"""Convolutions that pad one side more: what they read exists padded, once; values are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.convolutions import match
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.padding import with_padding_apart
from vmem_jax.core.convolution import Pass

# name -> (spatial size, kernel, strides, padding, groups, paddings written out). With strides of one
# the gradient to x is a convolution of the gradient to y, which is padded, too.
CASES = {
    "even size": (8, 3, 2, "SAME", 1, 1),
    "large kernel": (8, 5, 2, "SAME", 1, 1),
    "depthwise": (8, 3, 2, "SAME", 4, 1),
    "causal": (8, 3, 1, ((2, 0), (2, 0)), 1, 2),
    "each side another": (8, 3, 1, ((2, 0), (0, 1)), 1, 2),
    "what is left over": (7, 3, 2, ((3, 0), (0, 2)), 1, 1),
    "odd size": (9, 3, 2, "SAME", 1, 0),
    "both sides alike": (8, 3, 1, "SAME", 1, 0),
}


def case(name, chain=jnp.tanh):
    """A step with such a convolution of `chain(x)`, and its arguments."""
    size, kernel, stride, padding, groups, _ = CASES[name]
    layout = ("NHWC", "HWIO", "NHWC")

    def step(w, v, x):
        def loss(w, v):
            y = chain(x * v)
            y = lax.conv_general_dilated(
                y, w, (stride,) * 2, padding, None, None, layout, feature_group_count=groups
            )
            return jnp.sin(y).sum()

        return jax.grad(loss, (0, 1))(w, v)

    shapes = (kernel, kernel, 4 // groups, 8), (4,), (2, size, size, 4)
    rng = np.random.default_rng(0)
    return step, [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def convolutions(closed):
    found = [match(e, {}) for e in compat.open_jaxpr(closed).eqns if "conv_g" in e.primitive.name]
    return [each.convolution for each in found if each is not None]


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_same_and_both_sides_are_padded_alike(name):
    step, args = case(name)
    flat = flatten(jax.make_jaxpr(step)(*args))
    apart = with_padding_apart(flat, "gpu")
    assert str(apart).count(" pad[") == CASES[name][-1]
    forward = [c for c in convolutions(apart) if c.which == Pass.FORWARD]
    assert all(low == high for c in forward[:1] for low, high in c.padding)
    assert with_padding_apart(flat, "cpu") is flat
    ours, theirs = (jax.jit(jaxpr_as_fun(closed))(*args) for closed in (apart, flat))
    for mine, its in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-5)


def test_what_is_padded_exists_once():
    step, args = case("even size")
    found = capture(jax.jit(step).trace(*args).jaxpr, platform="gpu")
    shape = lambda b: getattr(found.variables[b].aval, "shape", ())
    passes = {s.convolution.which: s for s in found.program.steps if s.convolution is not None}
    read = [b for which in (Pass.FORWARD, Pass.BACKWARD_FILTER) for b in passes[which].reads]
    padded = [b for b in read if shape(b) == (2, 9, 9, 4)]
    assert len(padded) == 2 and len({*padded}) == 1


def test_an_argument_is_left_to_xla():
    def step(w, x):
        y = lax.conv_general_dilated(x, w, (2, 2), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
        return jnp.sin(y).sum()

    args = jnp.ones((3, 3, 4, 8)), jnp.ones((2, 8, 8, 4))
    flat = flatten(jax.make_jaxpr(jax.grad(step))(*args))
    assert with_padding_apart(flat, "gpu") is flat
