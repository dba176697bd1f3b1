"""Dropout masks from the key to bits, by one kernel: the same masks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture.bits import pack_p
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.layouts import Layout
from vmem_jax.capture.random_bits import sliced_bits
from vmem_jax.conv.drawn import DrawnMask, by_passes, drawn_mask_p, in_tiles
from vmem_jax.devices.targets import target
from vmem_jax.rewrite.drawn_masks import with_drawn_masks

KEY = jax.random.key(7)

MASKS = {
    "heads": ((3, 16, 5, 7), 1, 0),
    "padded rows": ((3, 8, 5, 13), 1, 3),
    "neighbours": ((4, 7, 64), 2, 0),
    "rows of samples": ((3, 24, 5), 1, 0),
    "more than a program's": ((5, 16, 197), 1, 3),
}
"""The shape of a mask, the axis along which it is packed, and elements that are added behind its
rows."""


def packed(mask, axis, more):
    behind = [(0, 0)] * (mask.ndim - 1) + [(0, more)]
    return pack_p.bind(jnp.pad(mask, behind) if more else mask, axis=axis)


def step(case, share=0.9):
    shape, axis, more = MASKS[case]
    return lambda key: packed(jax.random.bernoulli(key, share, shape), axis, more)


def with_kernels(fun, *given):
    """The step `fun` with its kernels, and their masks."""
    made = with_drawn_masks(flatten(jax.jit(fun).trace(*given).jaxpr))
    found = [e.params["drawn"] for e in every(made) if e.primitive is drawn_mask_p]
    return made, found


def every(closed):
    for eqn in compat.open_jaxpr(closed).eqns:
        yield eqn
        if eqn.primitive.name == "scan":
            yield from every(eqn.params["jaxpr"])


def same(fun, *given):
    """Whether the step `fun` draws the same with its kernels, and their masks."""
    made, found = with_kernels(fun, *given)
    wanted = jax.tree.leaves(jax.jit(fun)(*given))
    for a, b in zip(jax.jit(jaxpr_as_fun(made))(*given), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    return found


@pytest.mark.parametrize("case", MASKS)
def test_masks_are_the_same(case):
    [drawn] = same(step(case), KEY)
    words = jax.random.key_data(KEY)
    kernel = functools.partial(in_tiles, drawn=drawn, interpret=True)
    np.testing.assert_array_equal(kernel(words, jnp.int32(0))[0], jax.jit(step(case))(KEY))


@pytest.mark.parametrize(
    ("shape", "layout", "whole", "size"),
    [
        ((8, 16, 5, 7), Layout(0), 8, 2),
        ((24, 16, 5), Layout(0, inner=3), 8, 2),
        ((4, 16, 6), Layout(2), 6, 3),
    ],
)
def test_masks_of_a_part_are_the_same(shape, layout, whole, size):
    """Of the samples from the third on."""

    def part(key, offset):
        [bits] = [e for e in every(whole_draw) if e.primitive.name == "random_bits"]
        words = sliced_bits(bits, key, offset, layout, whole, size)
        return packed(as_share(words) < np.float32(0.7), 1, 0)

    def as_share(words):
        ones = jax.lax.bitcast_convert_type((words >> 9) | jnp.uint32(0x3F800000), jnp.float32)
        return jax.lax.max(jnp.float32(0), ones - jnp.float32(1))

    whole_mask = lambda key: jax.random.bernoulli(key, 0.7, shape)
    whole_draw = flatten(jax.jit(whole_mask).trace(KEY).jaxpr)
    [drawn] = same(part, KEY, jnp.int32(3))
    start = 3 * layout.inner
    there = jax.lax.slice_in_dim(
        jax.jit(whole_mask)(KEY), start, start + size * layout.inner, axis=layout.dim
    )
    kernel = functools.partial(in_tiles, drawn=drawn, interpret=True)
    made = kernel(jax.random.key_data(KEY), jnp.int32(3))[0]
    np.testing.assert_array_equal(made, jax.jit(lambda m: packed(m, 1, 0))(there))


@pytest.mark.parametrize("share", [2**-23, 0.1, 0.5, 0.9, 1 - 2**-23, np.float32(1 / 3)])
def test_thresholds(share):
    """Against the words where they decide: next to the share, and at both ends."""
    [drawn] = with_kernels(step("heads", share), KEY)[1]
    threshold = drawn.threshold
    words = np.array([0, 1, threshold - 1, threshold, 2**32 - 1], np.uint32)
    numbers = (words >> 9).astype(np.float32) * np.float32(2**-23)
    np.testing.assert_array_equal(words < threshold, numbers < np.float32(share))


def test_masks_in_loops():
    """Of flat bodies, as a plan's are."""
    body = jaxpr_as_fun(flatten(jax.jit(step("heads")).trace(KEY).jaxpr))
    drawn = lambda keys: jax.lax.scan(lambda _, key: ((), body(key)), (), keys)[1]
    assert len(same(drawn, jax.random.split(KEY, 3))) == 1


def other_readers(key):
    mask = jax.random.bernoulli(key, 0.9, (2, 8, 4))
    return packed(mask, 1, 0), mask


def other_numbers(key):
    return packed(jax.random.uniform(key, (2, 8, 4), minval=-1) < 0.3, 1, 0)


def turned(key):
    """One less what is between one and two."""
    words = jax.random.bits(key, (2, 8, 4))
    ones = jax.lax.bitcast_convert_type((words >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    return packed(jax.lax.max(jnp.float32(0), jnp.float32(1) - ones) < 0.5, 1, 0)


def half_words(key):
    return packed(jax.random.uniform(key, (2, 8, 4), jnp.bfloat16) < 0.5, 1, 0)


def traced_share(key):
    return packed(jax.random.bernoulli(key, jax.random.uniform(key), (2, 8, 4)), 1, 0)


def never(key):
    return packed(jax.random.bernoulli(key, 0.0, (2, 8, 4)), 1, 0)


def other_generator(key):
    own = jax.random.wrap_key_data(jnp.tile(jax.random.key_data(key), 2), impl="rbg")
    return packed(jax.random.bernoulli(own, 0.5, (2, 8, 4)), 1, 0)


@pytest.mark.parametrize(
    "fun", [other_readers, other_numbers, turned, half_words, traced_share, never, other_generator]
)
def test_others_are_left(fun):
    assert same(fun, KEY) == []


def test_by_passes_as_the_kernel():
    drawn = DrawnMask((2, 8, 5), (80, 5, 1), 160, 2**31, (2, 8, 7), 1)
    given = jax.random.key_data(KEY), jnp.int32(2)
    [wanted] = jax.jit(functools.partial(by_passes, drawn=drawn))(*given)
    np.testing.assert_array_equal(in_tiles(*given, drawn=drawn, interpret=True)[0], wanted)


def test_dimensions_are_as_few_as_there_can_be():
    [drawn] = with_kernels(step("heads"), KEY)[1]
    assert drawn.dimensions == [(6, 6, 280), (35, 35, 1)]
    [drawn] = with_kernels(step("padded rows"), KEY)[1]
    assert drawn.dimensions == [(3, 3, 520), (5, 5, 13), (16, 13, 1)]
    [drawn] = with_kernels(step("neighbours"), KEY)[1]
    assert drawn.dimensions == [(224, 224, 8)]


LAYERS = 4


def dropping(w, x, key):
    """The loss and its gradients of layers with dropout."""

    def loss(w):
        y = x
        for n, each in enumerate(w):
            kept = jax.random.bernoulli(jax.random.fold_in(key, n), 0.9, y.shape)
            y = jnp.where(kept, jnp.tanh(y @ each) / 0.9, 0)
        return jnp.square(y).mean()

    return jax.value_and_grad(loss)(w)


def dropping_arguments():
    w = list(jax.random.normal(KEY, (LAYERS, 256, 256)) / 16)
    return w, jax.random.normal(KEY, (6 * 1024, 256)), KEY


PLANS = {"whole": None, "in parts": 3}


def described(parts):
    """The step in bits, compiled for an H200 that need not be there."""
    allow = "order", "recompute", "bits", *(["sub_batches"] if parts else [])
    step = vmem_jax.jit(dropping, budget=0.8, allow=allow, sub_batches=parts)
    return step.lower(*dropping_arguments()).compile(target="h200")


@pytest.mark.gpu_compile
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_in_bits_draws_by_kernels(plan):
    compiled = described(PLANS[plan])
    assert compiled.plan.bits
    kernels = compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"')
    assert kernels == LAYERS


@pytest.mark.gpu_compile
@pytest.mark.parametrize("case", MASKS)
def test_a_gpu_draws_them_in_one_kernel(case):
    [sharding] = target("h200").shardings(
        [jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])]
    )
    key = jax.ShapeDtypeStruct(KEY.shape, KEY.dtype, sharding=sharding)
    made, _ = with_kernels(step(case), KEY)
    text = jax.jit(jaxpr_as_fun(made)).lower(key).compile().as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1 and " fusion(" not in text
