"""Convolutional layers for the tests: every thing that a layer can have, one after the other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vmem_jax.core.convolution import XLA, Configuration, Micro


@dataclasses.dataclass(frozen=True)
class Layer:
    name: str
    sizes: tuple[int, int, int] = (6, 4, 8)  # samples, channels of x and of y
    space: tuple[int, ...] = (7, 9)
    kernel: tuple[int, ...] = (3, 3)
    strides: tuple[int, ...] = (1, 1)
    padding: tuple[tuple[int, int], ...] = ((1, 1), (1, 1))
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    channels_last: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def numbers(self) -> lax.ConvDimensionNumbers:
        n = len(self.space)
        if not self.channels_last:
            return lax.ConvDimensionNumbers(*[tuple(range(n + 2))] * 3)
        data = (0, n + 1, *range(1, n + 1))
        return lax.ConvDimensionNumbers(data, (n + 1, n, *range(n)), data)  # NHWC, HWIO, NHWC

    def apply(self, x, w, conv=lax.conv_general_dilated, **kwargs):
        return conv(
            x,
            w,
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=self.numbers,
            feature_group_count=self.groups,
            **kwargs,
        )

    def arrays(self, dtype=jnp.float32, seed=0):
        """x, w and a gradient to y, at random."""
        rng = np.random.default_rng(seed)
        batch, c, k = self.sizes
        if self.channels_last:
            x, w = (batch, *self.space, c), (*self.kernel, c // self.groups, k)
        else:
            x, w = (batch, c, *self.space), (k, c // self.groups, *self.kernel)
        draw = lambda shape: rng.standard_normal(shape).astype(dtype)
        x, w = draw(x), draw(w)
        y = jax.eval_shape(self.apply, x, w)
        return x, w, draw(y.shape)


LAYERS = [
    Layer("3x3"),
    Layer("nchw", channels_last=False),
    Layer("valid", padding=((0, 0), (0, 0))),
    Layer("1x1", kernel=(1, 1), padding=((0, 0), (0, 0))),
    Layer("stem", (5, 3, 8), (15, 14), (7, 7), (2, 2), ((3, 3), (3, 3))),
    Layer("same_stride", space=(8, 8), strides=(2, 2), padding=((0, 1), (0, 1))),
    Layer("remainder", space=(10, 11), strides=(3, 2), padding=((1, 1), (2, 2)), kernel=(3, 5)),
    Layer("1x1_stride", kernel=(1, 1), strides=(2, 2), padding=((0, 0), (0, 0))),
    Layer("dilated", space=(12, 11), dilation=(2, 3), padding=((2, 2), (3, 3))),
    Layer("groups", groups=2),
    Layer("groups_nchw", groups=4, channels_last=False, strides=(2, 1)),
    Layer("depthwise", (6, 8, 8), groups=8),
    Layer("depthwise_multiplied", (6, 4, 8), groups=4, strides=(2, 2)),
    Layer("1d", (6, 4, 8), (19,), (5,), (2,), ((2, 2),), (1,)),
    Layer("3d", (6, 4, 8), (5, 6, 7), (3, 3, 3), (1, 2, 1), ((1, 1),) * 3, (1, 1, 1)),
    Layer("rectangle", kernel=(1, 7), padding=((0, 0), (3, 3))),
    Layer("more_than_the_input", space=(2, 2), kernel=(5, 5), padding=((3, 3), (3, 3))),
]


def split(batch: int, parts: int) -> Configuration:
    """`parts` micro-batches of XLA's own, as even as can be."""
    sizes = [len(part) for part in np.array_split(range(batch), parts)]
    return Configuration(tuple(Micro(n, XLA, (), 0, float("nan")) for n in sizes if n))
