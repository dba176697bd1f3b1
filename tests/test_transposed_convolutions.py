"""Transposed convolutions and their gradients: the same values, and XLA knows what they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.capture.batch import Batch, follow_batch
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.layouts import Layout
from vmem_jax.capture.transposed_convolutions import as_spreading, with_known_transposed
from vmem_jax.core.cards import machine_for
from vmem_jax.core.costs import analytic
from vmem_jax.core.plan import keep_plan
from vmem_jax.rewrite.rewrite import rewrite

ROWS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
CHANNELS = {2: ("NCHW", "OIHW", "NCHW")}
EXTENT = {"N": 2, "C": 3, "I": 3, "O": 4, "D": 3, "H": 5, "W": 6}


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.3, shape), jnp.float32)


def step(strides, padding="SAME", numbers=ROWS[2], flipped=False):
    """The gradients of a transposed convolution."""
    up = lambda w, x: lax.conv_transpose(
        x, w, strides, padding, dimension_numbers=numbers, transpose_kernel=flipped
    )
    return jax.grad(lambda w, x: jnp.sin(up(w, x)).sum(), (0, 1))


def arguments(kernel, numbers=ROWS[2], flipped=False):
    swapped = {"I": "O", "O": "I"} if flipped else {}
    sizes = iter(kernel)
    of = lambda d: EXTENT[swapped.get(d, d)] if d in "IO" else next(sizes)
    return normal(0, [of(d) for d in numbers[1]]), normal(1, [EXTENT[d] for d in numbers[0]])


def convolutions(flat):
    return [e.params for e in flat.jaxpr.eqns if e.primitive.name == "conv_general_dilated"]


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("padding", ["SAME", "VALID", 1])
@pytest.mark.parametrize(
    ("numbers", "kernel", "strides"),
    [
        (ROWS[1], (4,), (2,)),
        (ROWS[2], (2, 2), (2, 2)),
        (ROWS[2], (4, 3), (2, 2)),
        (ROWS[2], (5, 3), (3, 1)),
        (CHANNELS[2], (4, 4), (2, 2)),
        (ROWS[3], (3, 3, 4), (2, 2, 2)),
    ],
)
def test_gradients_are_the_same_and_nothing_spreads(numbers, kernel, strides, padding, flipped):
    padding = padding if isinstance(padding, str) else [(padding, n - 2) for n in kernel]
    fun, given = step(strides, padding, numbers, flipped), arguments(kernel, numbers, flipped)
    flat = flatten(jax.jit(fun).trace(*given).jaxpr)
    known, found = with_known_transposed(flat, "gpu")
    for a, b in zip(jaxpr_as_fun(flat)(*given), jaxpr_as_fun(known)(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    sums = [p for p in convolutions(known) if p["dimension_numbers"].lhs_spec[1] == 0]
    assert sums and all({*p["lhs_dilation"]} == {1} for p in sums)
    assert {*found.values()} == {int(np.prod(strides))}


@pytest.mark.parametrize(
    ("kernel", "options"),
    [((1, 1), {"strides": (2, 2)}), ((3, 3), {"strides": (1, 1)})],
)
def test_what_xla_knows_stays(kernel, options):
    given = arguments(kernel)
    flat = flatten(jax.jit(step(**options)).trace(*given).jaxpr)
    assert with_known_transposed(flat, "gpu")[1] == {}


def test_gradients_of_strided_convolutions_stay():
    w, x = arguments((3, 3))
    strided = lambda w, x: lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=ROWS[2])
    fun = jax.grad(lambda w, x: jnp.sin(strided(w, x)).sum(), (0, 1))
    flat = flatten(jax.jit(fun).trace(w, x).jaxpr)
    assert with_known_transposed(flat, "gpu")[1] == {}


def test_nothing_changes_on_a_cpu():
    flat = flatten(jax.jit(step((2, 2))).trace(*arguments((4, 4))).jaxpr)
    assert with_known_transposed(flat, "cpu") == (flat, {})


def test_the_step_can_be_divided():
    given = arguments((4, 4))
    captured = capture(jax.jit(step((2, 2))).trace(*given).jaxpr, platform="gpu")
    batch = follow_batch(captured.flat, [None, Layout(0)], 2)
    assert isinstance(batch, Batch), batch
    split = captured.in_sub_batches(batch, 2)
    rewritten = rewrite(split, keep_plan(split.program, None, 0, 0.0))
    for a, b in zip(step((2, 2))(*given), jaxpr_as_fun(rewritten)(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_plain_jit_takes_longer():
    """In proportion to the zeros: for the layer and the gradient to its kernel."""
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 4, 64, 32), (16, 32, 32, 64)))
    found = capture(jax.jit(step((2, 2))).trace(w, x).jaxpr, platform="gpu")
    costs = analytic(found.program, machine_for("h200"))
    known = found.flat.jaxpr.eqns, found.written.spreading
    plain = as_spreading(costs, found.program, *known)
    times = [b / a for a, b in zip(costs.seconds, plain.seconds, strict=True) if a]
    assert sorted(set(times)) == [1, 4] and times.count(4) == 2


@pytest.mark.gpu_compile
def test_a_gpu_neither_writes_zeros_nor_multiplies_images():
    pytest.importorskip("jax_plugins.xla_cuda13")
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 4, 64, 32), (16, 32, 32, 64)))
    fun = vmem_jax.jit(step((2, 2)), budget="1GiB", policy="exact", batch_argnums=1)
    text = fun.lower(w, x).compile(target="h200").as_text()
    assert text.count("__cudnn$convBackwardInput") == 1
    assert text.count("__cudnn$convBackwardFilter") == 1
    assert " pad(" not in text and "rhs_reversal" not in text
