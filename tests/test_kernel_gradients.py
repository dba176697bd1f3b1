"""Gradients to depthwise kernels as large as their images: the same values, and XLA knows them."""

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
from vmem_jax.capture.kernel_gradients import with_known_kernel_gradients
from vmem_jax.capture.layouts import Layout
from vmem_jax.jax_compat import open_jaxpr

LAYOUT = ("NHWC", "HWIO", "NHWC")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.3, shape), jnp.float32)


def step(w, x, groups=None, **options):
    def loss(w):
        many = {"feature_group_count": x.shape[-1] if groups is None else groups}
        padding = options.pop("padding", "SAME")
        strides = options.pop("strides", (1, 1))
        y = lax.conv_general_dilated(x, w, strides, padding, None, None, LAYOUT, **many)
        return jnp.sin(y).sum()

    return w - jax.grad(loss)(w)


def scanned(w, x):
    def loss(w):
        many = {"feature_group_count": x.shape[-1]}
        layer = lambda y, w: (
            jnp.sin(lax.conv_general_dilated(y, w, (1, 1), "SAME", None, None, LAYOUT, **many)),
            None,
        )
        return lax.scan(layer, x, w)[0].sum()

    return w - jax.grad(loss)(w)


# name -> (step, kernels, images, whether XLA misreads it)
CASES = {
    "as large": (step, (3, 3, 1, 8), (4, 3, 3, 8), True),
    "larger": (step, (7, 7, 1, 8), (4, 4, 5, 8), True),
    "one side": (step, (3, 5, 1, 8), (4, 9, 4, 8), True),
    "uneven": (lambda w, x: step(w, x, padding=((2, 0), (1, 1))), (3, 3, 1, 8), (2, 3, 3, 8), True),
    "in a loop": (scanned, (2, 3, 3, 1, 8), (4, 3, 3, 8), True),
    "smaller": (step, (3, 3, 1, 8), (4, 4, 4, 8), False),
    "dense": (lambda w, x: step(w, x, groups=1), (3, 3, 8, 8), (4, 3, 3, 8), False),
    "grouped": (lambda w, x: step(w, x, groups=2), (3, 3, 4, 8), (4, 3, 3, 8), False),
    "strided": (lambda w, x: step(w, x, strides=(2, 2)), (3, 3, 1, 8), (4, 4, 4, 8), False),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_same(name):
    fun, kernels, images, is_misread = CASES[name]
    args = normal(0, *kernels), normal(1, *images)
    flat = flatten(jax.make_jaxpr(fun)(*args))
    known, misread = with_known_kernel_gradients(flat, "gpu")
    assert len(misread) == is_misread
    assert (str(known) != str(flat)) == is_misread
    [ours], [theirs] = (jax.jit(jaxpr_as_fun(closed))(*args) for closed in (known, flat))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][-1]])
def test_windows_are_larger_than_results(name):
    fun, kernels, images, _ = CASES[name]
    flat = flatten(jax.make_jaxpr(fun)(normal(0, *kernels), normal(1, *images)))
    opened = open_jaxpr(with_known_kernel_gradients(flat, "gpu")[0])
    bodies = [open_jaxpr(e.params["jaxpr"]) for e in opened.eqns if e.primitive.name == "scan"]
    found = [
        e for each in (opened, *bodies) for e in each.eqns if "conv_general" in e.primitive.name
    ]
    [gradient] = [e for e in found if e.params["batch_group_count"] > 1]
    numbers = gradient.params["dimension_numbers"]
    for k, y in zip(numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True):
        assert gradient.invars[1].aval.shape[k] > gradient.outvars[0].aval.shape[y]


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][-1]])
def test_step_can_be_divided(name):
    fun, kernels, images, _ = CASES[name]
    flat = flatten(jax.make_jaxpr(fun)(normal(0, *kernels), normal(1, *images)))
    known, _ = with_known_kernel_gradients(flat, "gpu")
    found = follow_batch(known, [None, Layout(0)], images[0])
    assert isinstance(found, Batch), found


def test_nothing_changes_on_a_cpu():
    fun, kernels, images, _ = CASES["as large"]
    closed = jax.make_jaxpr(fun)(normal(0, *kernels), normal(1, *images))
    assert not capture(closed, platform="cpu").misread
    assert capture(closed, platform="gpu").misread


@pytest.mark.gpu_compile
def test_xla_takes_it_for_a_gradient_and_the_plan_for_faster():
    pytest.importorskip("jax_plugins.xla_cuda13")
    w, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((7, 7, 1, 1024), (64, 7, 7, 1024)))
    compiled = lambda **options: (
        vmem_jax.jit(step, budget="100MiB", **options).lower(w, x).compile(target="h200")
    )
    made, plain = compiled(), compiled(policy="keep")
    assert made.plan.policy != "keep"
    assert made.as_text().count("__cudnn$convBackwardFilter") == 1
    assert "__cudnn$convBackwardFilter" not in plain.as_text()
    assert plain.plan.predicted_seconds > 5 * made.plan.predicted_seconds
