"""Every convolution of a differentiated layer is found again, in its pass, with the layer's sizes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_cases import LAYERS, Layer, split

from vmem_jax import jax_compat as compat
from vmem_jax.capture.convolutions import match
from vmem_jax.conv.primitive import micro_convolution
from vmem_jax.core.convolution import Pass


def equations(layer: Layer, dtype=np.float32):
    """(jaxpr of all three passes, its arguments, its convolutions as `match` takes them)."""
    x, w, ct = layer.arrays(dtype)

    def passes(x, w, ct):
        y, back = jax.vjp(layer.apply, x, w)
        return y, *back(ct)

    jaxpr = jax.make_jaxpr(passes)(x, w, ct)
    opened = compat.open_jaxpr(jaxpr)
    maker = {v: e for e in opened.eqns for v in e.outvars}
    found = [(e, maker) for e in opened.eqns if e.primitive.name == "conv_general_dilated"]
    return opened, (x, w, ct), found


def evaluate(opened, args, replace):
    """The jaxpr with convolutions done by `replace(equation, maker, *operands)`."""
    env = dict(zip(opened.invars, args, strict=True))
    maker = {v: e for e in opened.eqns for v in e.outvars}
    for e in opened.eqns:
        operands = [a.val if isinstance(a, compat.Literal) else env[a] for a in e.invars]
        if e.primitive.name == "conv_general_dilated":
            outs = [replace(e, maker, *operands)]
        else:
            outs = e.primitive.bind(*operands, **e.params)
            outs = outs if e.primitive.multiple_results else [outs]
        env.update(zip(e.outvars, outs, strict=True))
    return [env[v] for v in opened.outvars]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_three_passes_of_one_layer(layer):
    _, _, found = equations(layer)
    convolutions = [match(*e).convolution for e in found]
    assert sorted(c.which for c in convolutions) == sorted(Pass)
    for c in convolutions:
        assert (c.batch, c.features_in, c.features_out) == layer.sizes
        assert c.size == layer.space and c.kernel == layer.kernel and c.groups == layer.groups
        assert c.strides == layer.strides and c.dilation == layer.dilation
        assert [low for low, _ in c.padding] == [low for low, _ in layer.padding]
        assert c.channels_last == layer.channels_last
        assert c.dtype == "float32" and not c.strict


@pytest.mark.parametrize("parts", [1, 3], ids=["whole", "three"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_micro_batches_give_the_same_numbers(layer, parts):
    with jax.enable_x64(True):
        opened, args, found = equations(layer, np.float64)
        called = []

        def replace(eqn, maker, lhs, rhs):
            m = match(eqn, maker)
            called.append(m.convolution.which)
            configuration = split(m.convolution.batch, parts)
            got = micro_convolution(m.convolution, configuration, *m.operands(lhs, rhs))
            return m.result(got)

        expected = evaluate(opened, args, lambda e, _, *o: e.primitive.bind(*o, **e.params))
        got = evaluate(opened, args, replace)
    assert len(called) == len(found) == 3
    for a, b in zip(map(np.asarray, got), map(np.asarray, expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * float(abs(b).max()))


@pytest.mark.parametrize("kernel, strides", [((1, 2), (2, 1)), ((3, 3), (2, 2)), ((4, 2), (1, 2))])
def test_a_transposed_convolution_has_a_kernel_that_nothing_flipped(kernel, strides):
    draw = np.random.default_rng(0).standard_normal
    x, w = draw((4, 5, 6, 2), np.float32), draw((*kernel, 2, 3), np.float32)
    up = lambda x, w: jax.lax.conv_transpose(
        x, w, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    m = match(only(up, x, w), {})
    assert m.convolution.which == Pass.BACKWARD_DATA
    got = m.result(micro_convolution(m.convolution, split(4, 2), *m.operands(x, w)))
    np.testing.assert_allclose(got, up(x, w), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_transposed_convolution_to_its_input_is_a_layer():
    """It is strided, and its kernel is flipped."""
    draw = np.random.default_rng(0).standard_normal
    x, w = draw((4, 5, 6, 2), np.float32), draw((4, 4, 2, 3), np.float32)
    up = lambda x: jax.lax.conv_transpose(
        x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y, gradient = jax.vjp(up, x)
    opened = compat.open_jaxpr(jax.make_jaxpr(lambda y: gradient(y)[0])(y))
    maker = {v: e for e in opened.eqns for v in e.outvars}
    [e] = [e for e in opened.eqns if e.primitive.name == "conv_general_dilated"]
    assert maker[e.invars[1]].primitive.name == "rev"
    m = match(e, maker)
    assert m.convolution.which == Pass.FORWARD and m.convolution.strides == (2, 2)
    got = m.result(micro_convolution(m.convolution, split(4, 2), *m.operands(y, w[::-1, ::-1])))
    np.testing.assert_allclose(got, gradient(y)[0], rtol=1e-5, atol=1e-5)


def conv(x, w, **kwargs):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, **kwargs)


def only(f, *args):
    opened = compat.open_jaxpr(jax.make_jaxpr(f)(*args))
    [e] = [e for e in opened.eqns if e.primitive.name == "conv_general_dilated"]
    return e


@pytest.mark.parametrize(
    "precision, strict",
    [(None, False), ("high", False), ("highest", True), (("default", "highest"), True)],
)
def test_strict_is_what_has_no_tensor_cores(precision, strict):
    x, w = jnp.ones((2, 4, 4, 3)), jnp.ones((3, 3, 3, 5))
    of = lambda *args: match(only(lambda x, w: conv(x, w, precision=precision), *args), {})
    assert of(x, w).convolution.strict is strict
    half = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    assert not of(*half).convolution.strict


@pytest.mark.parametrize(
    "f, args",
    [
        (lambda x, w: conv(x, w), (jnp.ones((2, 4, 4, 3), int), jnp.ones((3, 3, 3, 5), int))),
        (
            lambda x, w: conv(x, w, preferred_element_type=jnp.float32),
            (jnp.ones((2, 4, 4, 3), jnp.bfloat16), jnp.ones((3, 3, 3, 5), jnp.bfloat16)),
        ),
        (lambda x, w: conv(x, w), (jnp.ones((0, 4, 4, 3)), jnp.ones((3, 3, 3, 5)))),
        (
            lambda x, w: jax.lax.conv(x, w, (1,) * 4, "SAME"),
            (jnp.ones((1, 1, 2, 2, 2, 2)), jnp.ones((1, 1, 1, 1, 1, 1))),
        ),
        (  # crops instead of padding
            lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), [(-1, 0), (0, 0)]),
            (jnp.ones((1, 1, 5, 5)), jnp.ones((1, 1, 2, 2))),
        ),
        (lambda x, w: jnp.tensordot(x, w, 1), (jnp.ones((2, 3)), jnp.ones((3, 2)))),
    ],
    ids=["int", "mixed", "empty", "4-d", "cropped", "product"],
)
def test_what_cudnn_has_not_stays_xlas(f, args):
    eqns = compat.open_jaxpr(jax.make_jaxpr(f)(*args)).eqns
    assert all(match(e, {}) is None for e in eqns) and eqns


def test_flops_are_those_of_the_loops():
    layer = LAYERS[0]
    convolution = match(*equations(layer)[2][0]).convolution
    taps = math.prod(layer.kernel) * layer.sizes[1] // layer.groups
    assert convolution.flops == 2 * math.prod(convolution.y_shape) * taps
