"""VGG of any depth, in Flax Linen.

VGG-16 and VGG-19 are those of Simonyan and Zisserman, "Very deep convolutional networks for
large-scale image recognition" (ICLR 2015). The deeper ones follow the convention of the vDNN paper
(Rhu et al., "vDNN: virtualized deep neural networks for scalable, memory-efficient neural network
design", MICRO 2016): VGG-(16 + 5k) adds k convolutions to each of VGG-16's five groups.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.initialisers import drawn_in_float32, padding_aware_he
from vmem_jax.models.layers import ConvRelu

CHANNELS = (64, 128, 256, 512, 512)
"""Channels of the five groups, in every depth."""

_CONVS_16 = (2, 2, 3, 3, 3)
_CONVS_19 = (2, 2, 4, 4, 4)


def vgg_stages(depth: int) -> tuple[tuple[int, int], ...]:
    """Returns VGG-`depth`'s five groups, each as (channels, number of convolutions).

    Args:
      depth: 16, 19, or 16 + 5k (101, 116, 216, 316, 416, ...): layers with weights, the two hidden
        fully connected layers and the classifier among them.

    Raises:
      ValueError: for any other depth.
    """
    if depth == 19:
        convs: tuple[int, ...] = _CONVS_19
    elif depth >= 16 and (depth - 16) % 5 == 0:
        convs = tuple(count + (depth - 16) // 5 for count in _CONVS_16)
    else:
        raise ValueError(
            f"There is no VGG-{depth}: the depth is 19 or 16 + 5k for a whole k >= 0 "
            "(16, 21, ..., 101, 116, 216, 316, 416, ...)."
        )
    return tuple(zip(CHANNELS, convs, strict=True))


class VGG(nn.Module):
    """VGG without batch norm (Simonyan and Zisserman, ICLR 2015).

    Each group of 3x3 convolutions ends in a 2x2 max-pool; two fully connected ReLU layers and the
    classifier follow. Submodules: `stage1_layer2/conv`, `hidden1`, `hidden2`, `classifier`.

    Attributes:
      stages: (channels, convolutions) of each group, as `vgg_stages` gives them.
      classes: number of classes.
      head_width: width of the two hidden fully connected layers.
      dtype: type of the computation.
      param_dtype: type of the parameters.
      dropout: share of the hidden layers' outputs that training drops, 0 to 1; above 0 a train
        step needs `rngs={"dropout": key}` (the paper trains with 0.5).
      checkpoint: wrap each convolution and its ReLU in `nn.remat`, that is `jax.checkpoint`: only
        the layer's input is kept for the backward pass. Parameters and their names do not change.
    """

    stages: tuple[tuple[int, int], ...]
    classes: int
    head_width: int = 4096
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    dropout: float = 0.0
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images [n, h, w, c] of any floating type.

        Raises:
          ValueError: when the image is too small to be halved once per group.
        """
        smallest = 2 ** len(self.stages)
        if min(x.shape[1:3]) < smallest:
            raise ValueError(
                f"VGG with {len(self.stages)} groups needs images of at least "
                f"{smallest}x{smallest} pixels, not {x.shape[1]}x{x.shape[2]}."
            )
        layer = nn.remat(ConvRelu) if self.checkpoint else ConvRelu
        x = x.astype(self.dtype)
        for stage, (channels, convs) in enumerate(self.stages, start=1):
            for index in range(1, convs + 1):
                x = layer(
                    channels,
                    dtype=self.dtype,
                    param_dtype=self.param_dtype,
                    kernel_init=padding_aware_he(x.shape[1], x.shape[2]),
                    name=f"stage{stage}_layer{index}",
                )(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        he = drawn_in_float32(jax.nn.initializers.he_normal())
        for index in (1, 2):
            x = nn.Dense(
                self.head_width,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=he,
                name=f"hidden{index}",
            )(x)
            x = nn.relu(x)
            if self.dropout > 0:
                x = nn.Dropout(self.dropout, deterministic=not train, name=f"dropout{index}")(x)
        x = nn.Dense(
            self.classes,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=drawn_in_float32(jax.nn.initializers.lecun_normal()),
            name="classifier",
        )(x)
        return x.astype(jnp.float32)
