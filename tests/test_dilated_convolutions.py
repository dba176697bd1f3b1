"""Dilated kernels and the gradients to them: the same values, and XLA knows what they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from vmem_jax.capture import capture
from vmem_jax.capture.batch import Batch, follow_batch
from vmem_jax.capture.dilated_convolutions import MISREAD, with_known_dilated
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.layouts import Layout
from vmem_jax.capture.transposed_convolutions import as_spreading
from vmem_jax.core.cards import machine_for
from vmem_jax.core.costs import analytic
from vmem_jax.core.plan import keep_plan
from vmem_jax.devices.targets import target
from vmem_jax.rewrite.rewrite import rewrite

ROWS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
CHANNELS = {1: ("NCW", "OIW", "NCW"), 2: ("NCHW", "OIHW", "NCHW")}
EXTENT = {"N": 2, "C": 6, "I": 6, "O": 4, "D": 7, "H": 13, "W": 17}


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.3, shape), jnp.float32)


def step(dilation, padding, numbers=ROWS[1], strides=None, groups=1):
    """The gradients of a dilated convolution."""

    def convolved(w, x):
        by = strides or (1,) * len(dilation)
        given = (by, padding, None, dilation, numbers, groups)
        return lax.conv_general_dilated(x, w, *given)

    return jax.grad(lambda w, x: jnp.sin(convolved(w, x)).sum(), (0, 1))


def arguments(kernel, numbers=ROWS[1], groups=1):
    sizes = iter(kernel)
    of = lambda d: EXTENT[d] // (groups if d == "I" else 1) if d in "IO" else next(sizes)
    return normal(0, [of(d) for d in numbers[1]]), normal(1, [EXTENT[d] for d in numbers[0]])


def flat_of(fun, given):
    return flatten(jax.jit(fun).trace(*given).jaxpr)


def convolutions(flat):
    return [e.params for e in flat.jaxpr.eqns if e.primitive.name == "conv_general_dilated"]


def is_gradient_to_kernel(params):
    return params["dimension_numbers"].lhs_spec[1] == 0


def is_known(params):
    """Whether XLA knows a convolution: cuDNN has dilated kernels, but not dilated windows."""
    if is_gradient_to_kernel(params):
        return {*params["window_strides"]} == {1}
    return {*params["rhs_dilation"]} == {1} or all(low == high for low, high in params["padding"])


@pytest.mark.parametrize(
    ("numbers", "kernel", "dilation", "padding"),
    [
        (ROWS[1], (2,), (4,), [(4, 0)]),
        (ROWS[1], (2,), (16,), [(16, 0)]),
        (ROWS[1], (3,), (5,), "SAME"),
        (ROWS[1], (3,), (2,), [(9, 3)]),
        (CHANNELS[1], (2,), (3,), [(3, 0)]),
        (ROWS[2], (3, 3), (2, 2), "SAME"),
        (ROWS[2], (3, 3), (6, 4), "SAME"),
        (ROWS[2], (3, 1), (2, 3), "VALID"),
        (ROWS[2], (2, 3), (1, 4), "SAME"),
        (CHANNELS[2], (3, 2), (4, 3), [(8, 1), (0, 3)]),
        (ROWS[3], (2, 2, 3), (2, 3, 2), "SAME"),
    ],
)
def test_gradients_are_the_same_and_xla_knows_them(numbers, kernel, dilation, padding):
    fun, given = step(dilation, padding, numbers), arguments(kernel, numbers)
    flat = flat_of(fun, given)
    assert not all(map(is_known, convolutions(flat)))
    known, found = with_known_dilated(flat, "gpu")
    for a, b in zip(jaxpr_as_fun(flat)(*given), jaxpr_as_fun(known)(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert all(map(is_known, convolutions(known)))
    assert MISREAD in found.values()


def test_a_window_is_larger_than_the_result():
    """Or XLA takes it for a kernel again."""
    given = arguments((3, 3), ROWS[2])
    known, _ = with_known_dilated(flat_of(step((12, 12), "SAME", ROWS[2]), given), "gpu")
    [window] = [
        eqn.invars[1].aval.shape
        for eqn in known.jaxpr.eqns
        if eqn.primitive.name == "conv_general_dilated" and is_gradient_to_kernel(eqn.params)
    ]
    assert window[1:3] == (4, 4)


def test_one_input_is_divided_once():
    """That of the filter and the gate of a gated convolution."""

    def loss(v, w, x):
        by = lambda w: lax.conv_general_dilated(x, w, (1,), [(4, 0)], None, (4,), ROWS[1])
        return (jnp.tanh(by(v)) * jax.nn.sigmoid(by(w))).sum()

    w, x = arguments((2,))
    known, _ = with_known_dilated(flat_of(jax.grad(loss, (0, 1)), (w, w * 2, x)), "gpu")
    read = [e.invars[0] for e in known.jaxpr.eqns if is_conv_to_kernel(e)]
    assert len(read) == 2 and read[0] is read[1]


def is_conv_to_kernel(eqn):
    return eqn.primitive.name == "conv_general_dilated" and is_gradient_to_kernel(eqn.params)


@pytest.mark.parametrize(
    ("kernel", "dilation", "options"),
    [((3,), (1,), {}), ((1,), (4,), {}), ((3,), (2,), {"strides": (2,)})],
)
def test_what_is_not_dilated_or_has_strides_stays(kernel, dilation, options):
    fun = step(dilation, "SAME", **options)
    flat = flat_of(fun, arguments(kernel))
    of_kernel = [p for p in convolutions(flat) if is_gradient_to_kernel(p)]
    known, found = with_known_dilated(flat, "gpu")
    assert [p for p in convolutions(known) if is_gradient_to_kernel(p)] == of_kernel
    assert MISREAD not in found.values()


def test_nothing_changes_on_a_cpu():
    flat = flat_of(step((4,), [(4, 0)]), arguments((2,)))
    assert with_known_dilated(flat, "cpu") == (flat, {})


def test_groups():
    fun, given = step((3,), [(3, 0)], groups=2), arguments((2,), groups=2)
    flat = flat_of(fun, given)
    known, _ = with_known_dilated(flat, "gpu")
    for a, b in zip(jaxpr_as_fun(flat)(*given), jaxpr_as_fun(known)(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_step_can_be_divided():
    fun, given = step((3, 2), "SAME", ROWS[2]), arguments((3, 3), ROWS[2])
    captured = capture(jax.jit(fun).trace(*given).jaxpr, platform="gpu")
    batch = follow_batch(captured.flat, [None, Layout(0)], 2)
    assert isinstance(batch, Batch), batch
    split = captured.in_sub_batches(batch, 2)
    rewritten = rewrite(split, keep_plan(split.program, None, 0, 0.0))
    for a, b in zip(fun(*given), jaxpr_as_fun(rewritten)(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_plain_jit_takes_longer():
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 64, 32), (16, 800, 64)))
    found = capture(jax.jit(step((8,), [(8, 0)])).trace(w, x).jaxpr, platform="gpu")
    costs = analytic(found.program, machine_for("h200"))
    plain = as_spreading(costs, found.program, found.flat.jaxpr.eqns, found.written.spreading)
    times = {b / a for a, b in zip(costs.seconds, plain.seconds, strict=True) if a}
    assert times == {1, 5, MISREAD}  # nine taps of which two are not zero


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("numbers", "kernel", "dilation", "padding"),
    [(ROWS[1], (2,), (4,), [(4, 0)]), (ROWS[2], (3, 3), (4, 4), "SAME")],
)
def test_xla_knows_them(numbers, kernel, dilation, padding):
    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    given = arguments(kernel, numbers)
    described = [
        jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=sharding)
        for a, sharding in zip(given, target("h200").shardings([cpu] * 2), strict=True)
    ]

    def compiled(known):
        flat = flat_of(step(dilation, padding, numbers), described)
        flat = with_known_dilated(flat, "gpu")[0] if known else flat
        text = jax.jit(jaxpr_as_fun(flat)).lower(*described).compile().as_text()
        return text.count('custom_call_target="__cudnn$convBackwardFilter"')

    assert (compiled(known=False), compiled(known=True)) == (0, 1)
