"""Seconds of convolutions on tensor cores, beside what was traced in steps on an H200."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import Builder

from vmem_jax.core.cards import CARDS
from vmem_jax.core.convolution import Convolution, Pass
from vmem_jax.core.tensor_cores import share_of_rate

FORWARD, TO_INPUT, TO_KERNEL = Pass.FORWARD, Pass.BACKWARD_DATA, Pass.BACKWARD_FILTER


def layer(which, read, made, side, batch, kernel=3, dtype="float16", groups=1):
    pad = ((kernel // 2,) * 2,) * 2
    sizes = (side, side), (kernel, kernel), (1, 1), pad, (1, 1)
    return Convolution(which, dtype, False, batch, read, made, *sizes, groups=groups)


def heavy(convolution, nbytes):
    """A step of a program that is this convolution, which moves so many bytes."""
    b = Builder()
    b.step([b.input(1)], 1, op="conv_general_dilated", flops=convolution.flops)
    return dataclasses.replace(b.steps[0], convolution=convolution, nbytes=nbytes, dtype="bfloat16")


# pass, channels, side, batch: microseconds in ResNet-50(256) and ResNet-152(128), float16, 3 x 3
TRACED = {
    (FORWARD, 64, 56, 256): 124.2,
    (FORWARD, 64, 56, 128): 67.0,
    (FORWARD, 128, 28, 256): 83.9,
    (FORWARD, 128, 28, 128): 46.2,
    (FORWARD, 256, 14, 256): 77.5,
    (FORWARD, 256, 14, 128): 42.4,
    (FORWARD, 512, 7, 256): 75.9,
    (TO_INPUT, 64, 56, 256): 127.4,
    (TO_INPUT, 128, 28, 256): 83.1,
    (TO_INPUT, 256, 14, 128): 42.4,
    (TO_KERNEL, 64, 56, 256): 128.5,
    (TO_KERNEL, 64, 56, 128): 70.4,
    (TO_KERNEL, 128, 28, 256): 93.6,
    (TO_KERNEL, 256, 14, 128): 54.4,
    (TO_KERNEL, 512, 7, 256): 80.9,
}


@pytest.mark.parametrize(("which", "channels", "side", "batch"), TRACED)
def test_a_convolution_takes_what_was_traced(which, channels, side, batch):
    found = layer(which, channels, channels, side, batch)
    seconds = CARDS["h200"].machine.convolution_seconds(found)
    assert 1e6 * seconds == pytest.approx(TRACED[which, channels, side, batch], rel=0.17)


@pytest.mark.parametrize("channels", [64, 128, 256])
def test_twice_the_images_take_less_than_twice_as_long(channels):
    """7 to 10 us less, by what was traced: what it takes to start, and some of a round of tiles."""
    side = {64: 56, 128: 28, 256: 14}[channels]
    half, whole = (
        1e6 * CARDS["h200"].machine.convolution_seconds(layer(FORWARD, *(channels,) * 2, side, n))
        for n in (128, 256)
    )
    traced = 2 * TRACED[FORWARD, channels, side, 128] - TRACED[FORWARD, channels, side, 256]
    assert 2 * half - whole == pytest.approx(traced, abs=4)


def test_several_taps_reach_more_than_one():
    """Gradients to kernels do not."""
    rates = {
        which: [share_of_rate(layer(which, 256, 256, 28, 128, k)) for k in (1, 3)] for which in Pass
    }
    assert all((many > one) == (which != TO_KERNEL) for which, (one, many) in rates.items())


# channels read and made, side, batch: microseconds by themselves with a sum behind, bfloat16, 1 x 1
WITH_A_SUM = {
    (128, 128, 126, 8): 35.5,
    (16, 96, 112, 128): 228.4,
    (96, 576, 14, 128): 24.8,
    (480, 192, 14, 128): 20.2,
    (1024, 256, 14, 256): 55.8,
}


@pytest.mark.parametrize("sizes", WITH_A_SUM)
def test_a_convolution_with_a_sum_takes_what_was_measured(sizes):
    """What is measured has two kernels more: a bias of zeros, and the filter's transpose."""
    bare = layer(FORWARD, *sizes, kernel=1, dtype="bfloat16")
    step = heavy(bare, bare.nbytes + bare.y_nbytes)
    machine = CARDS["h200"].machine
    assert 1e6 * machine.seconds(step) + 2.5 == pytest.approx(WITH_A_SUM[sizes], rel=0.17)
    within = machine.seconds(heavy(bare, bare.nbytes + bare.y_nbytes // 2))
    assert machine.seconds(step) > 1.1 * within


def test_the_width_of_what_is_made_counts():
    narrow = {which: share_of_rate(layer(which, 256, 16, 28, 128)) for which in Pass}
    assert max(narrow[FORWARD], narrow[TO_KERNEL]) < 0.25
    assert narrow[TO_INPUT] > 0.98


def test_the_last_round_of_tiles_is_computed_whole():
    """One multiprocessor of 132 has a second tile."""
    one, two = (share_of_rate(layer(FORWARD, 256, 256, 16, n, kernel=1)) for n in (66, 67))
    assert one == 1.0 and two == pytest.approx(67 / 132, abs=0.26)
    assert two < 0.8


def test_a_tile_is_computed_whole():
    half, whole = (share_of_rate(layer(FORWARD, 256, n, 28, 128)) for n in (264, 256))
    assert half < 0.8 < 0.98 < whole


@pytest.mark.parametrize("others", [{"dtype": "float32"}, {"groups": 64}], ids=str)
def test_other_types_and_depthwise_ones_have_their_own_rates(others):
    assert share_of_rate(dataclasses.replace(layer(FORWARD, 64, 64, 56, 64), **others)) == 1.0


def test_a_cpu_has_no_tensor_cores():
    found = layer(FORWARD, 64, 64, 56, 8, dtype="bfloat16")
    machine = CARDS["cpu"].machine
    expected = max(found.flops / machine.flops[""], found.nbytes / machine.bandwidth)
    assert machine.convolution_seconds(found) == pytest.approx(expected + machine.launch)
