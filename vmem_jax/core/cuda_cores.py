"""cuda_cores: what convolutions in strict float32, which tensor cores do not compute, take.

cuDNN computes those of 3 × 3 to 7 × 7 with stride 1 by transforms: tiles of x and w are transformed,
multiplied, and transformed back, with fewer operations in between, but several passes over x and y
(Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, section 4). It
computes all others directly, far below the rate of products.

The three constants are those of least squares over 14 whole steps of plain `jax.jit`, of 12 networks,
on an H200. The steps are predicted at 0.80 to 1.15 of what they take, each by the constants of the
other 13 at 0.77 to 1.20; with the rate of products for all it was 0.61 to 1.42
(`benchmarks/strict_convolutions.py`).
"""

from __future__ import annotations

import math

from vmem_jax.core.convolution import Convolution

_DIRECT = 0.49
"""Share of the rate of products in strict float32 that direct convolutions reach."""

_TRANSFORMED = 3.1
"""The same of 3 × 3 by transforms, transforms aside. Of larger kernels more operations are saved."""

_PASSES = 16.5
"""Passes over x and y that transforms take."""

_LEAST_CHANNELS = 16
"""Of x; with fewer a transform does not pay."""


def is_transformed(convolution: Convolution) -> bool:
    """Whether it is computed by transforms."""
    c = convolution
    size = c.kernel[0]
    square = c.kernel == (size, size) and size in (3, 5, 7)
    plain = c.groups == 1 and all(n == 1 for n in (*c.strides, *c.dilation))
    return square and plain and c.features_in >= _LEAST_CHANNELS


def share_of_strict_rate(convolution: Convolution) -> float:
    """Of the rate of products in strict float32."""
    if not is_transformed(convolution):
        return _DIRECT
    return _TRANSFORMED * convolution.flops / flops_of_3x3(convolution)


def flops_of_3x3(convolution: Convolution) -> float:
    """Its operations if its kernel were 3 × 3: transforms leave about as many of any."""
    return convolution.flops * 9 / math.prod(convolution.kernel)


def transform_nbytes(convolution: Convolution) -> float:
    """Bytes that its transforms read and write."""
    if not is_transformed(convolution):
        return 0.0
    return _PASSES * (convolution.x_nbytes + convolution.y_nbytes)
