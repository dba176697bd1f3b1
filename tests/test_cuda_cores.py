"""Seconds of convolutions in strict float32, beside what an H200 takes for XLA's own, alone."""

from __future__ import annotations

import dataclasses

import pytest

from vmem_jax.core.cards import CARDS
from vmem_jax.core.convolution import Convolution, Pass
from vmem_jax.core.cuda_cores import is_transformed, transform_nbytes

MACHINE = CARDS["h200"].machine


def layer(kernel, read, made, side, stride=1, which=Pass.FORWARD, **others):
    pad = ((kernel // 2,) * 2,) * 2
    sizes = (side, side), (kernel, kernel), (stride, stride), pad, (1, 1)
    return Convolution(which, "float32", True, 256, read, made, *sizes, **others)


# kernel, channels read and made, side, stride: 10^12 operations a second
# (benchmarks/results/h200_convolution_layers.jsonl)
MEASURED = {
    (11, 3, 64, 224, 4): 20.8,
    (7, 3, 64, 224, 2): 19.5,
    (3, 192, 384, 13, 1): 74.7,
    (3, 384, 256, 13, 1): 79.5,
    (3, 64, 64, 224, 1): 36.3,
    (3, 512, 512, 28, 1): 135.0,
    (3, 512, 512, 14, 1): 110.5,
    (5, 64, 192, 27, 1): 173.0,
}


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_a_convolution_takes_about_what_was_measured(sizes):
    found = layer(*sizes)
    rate = found.flops / MACHINE.convolution_seconds(found) / 1e12
    assert 1 / 1.7 < rate / MEASURED[sizes] < 1.7


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, True),
        ({"strides": (2, 2)}, False),
        ({"dilation": (2, 2)}, False),
        ({"kernel": (1, 1)}, False),
        ({"kernel": (1, 3)}, False),
        ({"features_in": 3}, False),
        ({"groups": 2}, False),
    ],
    ids=str,
)
def test_square_kernels_with_stride_1_are_transformed(others, expected):
    found = dataclasses.replace(layer(3, 64, 64, 56), **others)
    assert is_transformed(found) == expected == (transform_nbytes(found) > 0)


def test_a_depthwise_convolution_has_its_own_rate():
    found = layer(3, 64, 64, 56, groups=64)
    fast = dataclasses.replace(MACHINE, bandwidth=1e30)
    assert found.flops / fast.convolution_seconds(found) < 0.31 * MACHINE.flops[""]
    # it does not move while it computes
    moving = found.nbytes / MACHINE.bandwidth
    both = fast.convolution_seconds(found) + moving
    assert MACHINE.convolution_seconds(found) == pytest.approx(both)


CONVNEXT_B = [(56, 128)] * 3 + [(28, 256)] * 3 + [(14, 512)] * 27 + [(7, 1024)] * 3
"""Height and width, and channels, of its depthwise convolutions."""


@pytest.mark.parametrize(("which", "micros"), [(Pass.FORWARD, 41.7), (Pass.BACKWARD_FILTER, 38.3)])
def test_depthwise_convolutions_of_32_images_take_as_long_as_on_an_h200(which, micros):
    """In a traced step of ConvNeXt-B(128) in four sub-batches."""
    layers = [layer(7, c, c, side, groups=c) for side, c in CONVNEXT_B]
    found = [
        dataclasses.replace(c, batch=32, dtype="bfloat16", strict=False, which=which)
        for c in layers
    ]
    seconds = [CARDS["h200"].machine.convolution_seconds(c) for c in found]
    assert sum(seconds) / len(seconds) == pytest.approx(1e-6 * micros, rel=0.1)


def test_a_cpu_computes_all_at_the_rate_of_products():
    found, machine = layer(3, 64, 64, 56), CARDS["cpu"].machine
    expected = max(found.flops / machine.flops[""], found.nbytes / machine.bandwidth)
    assert machine.convolution_seconds(found) == pytest.approx(expected + machine.launch)
