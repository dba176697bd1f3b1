"""AlexNet and OverFeat, in Flax Linen: few convolutions with large kernels, and wide heads.

AlexNet is the one-tower form of Krizhevsky, "One weird trick for parallelizing convolutional neural
networks" (arXiv:1404.5997, 2014), without local response normalisation. OverFeat is the fast model of
Sermanet et al., "OverFeat: integrated recognition, localization and detection using convolutional
networks" (ICLR 2014).
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.layers import ConvRelu, Head


class Convolution(NamedTuple):
    """One convolution with its ReLU.

    Attributes:
      channels: output channels.
      kernel, stride, padding: of both spatial dimensions.
      pool: window of the max-pool behind it, at stride 2; 0 for none.
    """

    channels: int
    kernel: int
    stride: int
    padding: int
    pool: int


ALEXNET = (
    Convolution(64, 11, 4, 2, pool=3),
    Convolution(192, 5, 1, 2, pool=3),
    Convolution(384, 3, 1, 1, pool=0),
    Convolution(256, 3, 1, 1, pool=0),
    Convolution(256, 3, 1, 1, pool=3),
)
OVERFEAT = (
    Convolution(96, 11, 4, 0, pool=2),
    Convolution(256, 5, 1, 0, pool=2),
    Convolution(512, 3, 1, 1, pool=0),
    Convolution(1024, 3, 1, 1, pool=0),
    Convolution(1024, 3, 1, 1, pool=2),
)


class AlexNet(nn.Module):
    """Convolutions in a row, two fully connected ReLU layers and a classifier.

    Submodules: `layer1/conv`, ..., `head/hidden1`, `head/hidden2`, `head/classifier`.

    Attributes:
      layers: `ALEXNET` or `OVERFEAT`.
      head: widths of the hidden layers.
      classes: number of classes.
      dtype: type of the computation.
      param_dtype: type of the parameters.
      checkpoint: wrap each convolution and its ReLU in `jax.checkpoint`.
    """

    layers: tuple[Convolution, ...]
    head: tuple[int, int]
    classes: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images [n, h, w, c] of any floating type."""
        layer = nn.remat(ConvRelu) if self.checkpoint else ConvRelu
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        x = x.astype(self.dtype)
        for index, form in enumerate(self.layers, start=1):
            x = layer(
                form.channels,
                kernel=form.kernel,
                stride=form.stride,
                padding=form.padding,
                name=f"layer{index}",
                **types,
            )(x)
            if form.pool:
                x = nn.max_pool(x, (form.pool, form.pool), strides=(2, 2))
        return Head(self.head, self.classes, name="head", **types)(x)
