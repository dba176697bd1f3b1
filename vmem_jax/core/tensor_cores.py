"""tensor_cores: what share of a card's rate the matrix product of a convolution reaches by its sizes.

cuDNN computes a convolution as a product, pixels by channels, in tiles of a power of two. A narrow
tile loads more for each operation: of 128 pixels and n channels 128 · n operations take 128 + n loads
for each summed channel. So up to some width the rate is in proportion to 128 · n / (128 + n), and a
tile that channels do not fill is computed whole; so is the last round of tiles, of which each
multiprocessor has one.

From the convolutions of ResNet-50(256) and ResNet-152(128) in float16 on an H200, traced in steps:
3 x 3 with 64 channels take 1.57 times as long as their operations at the rate of those with 256 and
512, with 128 channels 1.08, in all three passes.
"""

from __future__ import annotations

import math

from vmem_jax.core.convolution import Convolution, Pass

_TILES = (8, 16, 32, 64, 128, 256)
"""Channels of a tile."""

_PIXELS = 128
"""Of a tile."""

_VECTOR = 8
"""Channels that are read together, 16 bytes."""

_CORES = 132
"""Multiprocessors of an H100 and of an H200; other cards are taken for alike."""

_LOADED = 0.015
"""The share of the rate for each unit of _PIXELS · n / (_PIXELS + n): 0.64 with 64 channels."""

_MORE = {Pass.FORWARD: 2e-6, Pass.BACKWARD_DATA: 2e-6, Pass.BACKWARD_FILTER: 6e-6}
"""Seconds of the kernels beside: one that clears memory, and for gradients to kernels one or two that
add up what is computed of parts of the pixels, 3 to 8 us."""

_START = 5e-6
"""Seconds that a kernel of several taps takes longer where each multiprocessor has a tile. 3 x 3 with
64, 128 and 256 channels take 67.0, 46.2 and 42.4 us of 128 images in steps of ResNets, and 124.2,
83.9 and 77.5 of 256: twice the former are 7 to 10 us more. With fewer tiles it is less: a GoogLeNet's
in 128 sub-batches of one image take no longer than by their rate."""

_TAPS = 1.05
"""How many times the rate of one tap several taps reach behind that, forward and to inputs."""

DTYPES = ("bfloat16", "float16")
"""Types in which convolutions were traced."""


def share_of_rate(convolution: Convolution) -> float:
    """Of that of a convolution with 256 channels and one tap, more where it has several; 1 for other
    types, for depthwise ones, and where channels are no whole vectors, whose rate is the machine's
    `_UNALIGNED` alone."""
    c = convolution
    if not _is_product(c) or c.features_in % _VECTOR or c.features_out % _VECTOR:
        return 1.0
    read, made = c.features_in // c.groups, c.features_out // c.groups
    if c.which == Pass.BACKWARD_FILTER:  # its sums are divided, so that all have a tile
        return min(_filled(made, 0), _filled(read * math.prod(c.kernel), 0))
    faster = _TAPS if math.prod(c.kernel) > 1 else 1.0
    return faster * _filled(made if c.which == Pass.FORWARD else read, _high(c))


def more_seconds(convolution: Convolution) -> float:
    """Seconds that `convolution` takes however small it is, with those of the kernels beside it."""
    c = convolution
    if not _is_product(c):
        return 0.0
    start = _START * min(1.0, _high(c) / _CORES) if math.prod(c.kernel) > 1 else 0.0
    return start + _MORE[c.which]


def _high(c: Convolution) -> int:
    """Tiles of pixels: of the image that is made, or whose gradient is read."""
    pixels = c.batch * math.prod(c.size if c.which == Pass.BACKWARD_DATA else c.out)
    return -(-pixels // _PIXELS)


def _is_product(c: Convolution) -> bool:
    return c.dtype in DTYPES and not c.groups == c.features_in > 1


def _filled(channels: int, high: int) -> float:
    """The share of the rate with the tile that is best for so many channels.

    Args:
      high: tiles of pixels; 0 where these do not count.
    """

    def share(n: int) -> float:
        wide = -(-channels // n)
        rounds = high * wide / _CORES
        loaded = min(1.0, _LOADED * _PIXELS * n / (_PIXELS + n))
        full = rounds / math.ceil(rounds) if high else 1.0
        return loaded * channels / (n * wide) * full

    return max(map(share, _TILES))
