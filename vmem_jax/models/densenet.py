"""DenseNet for small images, in Flax Linen.

The form without bottlenecks of Huang et al., "Densely connected convolutional networks" (CVPR 2017):
three dense blocks, with a 1x1 convolution and 2x2 average pooling between them.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.layers import HE, Head, batch_norm

BLOCKS = 3
STEM = 16
"""Channels of the first convolution."""


def dense_layers(depth: int) -> int:
    """Returns the layers of each of DenseNet-`depth`'s blocks.

    Raises:
      ValueError: the depth is not 3n + 4.
    """
    if depth < BLOCKS + 4 or (depth - 4) % BLOCKS:
        raise ValueError(
            f"There is no DenseNet-{depth}: the depth is 3n + 4 (7, 10, ..., 40, ...)."
        )
    return (depth - 4) // BLOCKS


class NormReluConv(nn.Module):
    """Batch norm, ReLU, then a convolution without bias: [n, h, w, c] -> `dtype`[n, h, w, channels].

    Attributes:
      channels: output channels.
      kernel: of both spatial dimensions.
      train: normalise by the batch's statistics and not by the running ones.
      dtype: type of the computation and of the result.
      param_dtype: type of the kernel; batch norm's own stay float32.
    """

    channels: int
    kernel: int
    train: bool
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = batch_norm(self.train, self.dtype, "norm")(x)
        return nn.Conv(
            self.channels,
            (self.kernel, self.kernel),
            padding="SAME",
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=HE,
            name="conv",
        )(nn.relu(x))


class DenseNet(nn.Module):
    """DenseNet without bottlenecks (Huang et al., CVPR 2017). Each layer reads all before it.

    Submodules: `stem`, `block1_layer1/conv`, ..., `transition1/conv`, ..., `norm`, `head/classifier`.

    Attributes:
      layers: of each block, as `dense_layers` gives them.
      growth: channels that each layer adds (k).
      classes: number of classes.
      dtype: type of the computation.
      param_dtype: type of the parameters.
      checkpoint: wrap each layer in `jax.checkpoint`.
    """

    layers: int
    growth: int
    classes: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images [n, h, w, c] of any floating type."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        layer = nn.remat(NormReluConv) if self.checkpoint else NormReluConv
        x = nn.Conv(STEM, (3, 3), use_bias=False, kernel_init=HE, name="stem", **types)(
            x.astype(self.dtype)
        )
        for block in range(1, BLOCKS + 1):
            for index in range(1, self.layers + 1):
                name = f"block{block}_layer{index}"
                new = layer(self.growth, kernel=3, train=train, name=name, **types)(x)
                x = jnp.concatenate((x, new), axis=-1)
            if block < BLOCKS:
                name = f"transition{block}"
                x = NormReluConv(x.shape[-1], kernel=1, train=train, name=name, **types)(x)
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = batch_norm(train, self.dtype, "norm")(x)
        return Head((), self.classes, name="head", **types)(nn.relu(x).mean(axis=(1, 2)))
