"""FCN-8s, in Flax Linen: a class for each pixel.

Long, Shelhamer and Darrell, "Fully convolutional networks for semantic segmentation" (CVPR 2015), on
VGG-16, with all convolutions padded to the size of their input.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.layers import LECUN, ConvRelu
from vmem_jax.models.vgg import vgg_stages


class FCN(nn.Module):
    """FCN-8s (Long et al., CVPR 2015): scores of the last three groups, added up from coarse to fine.

    Submodules: `stage1_layer1/conv`, ..., `conv6`, `conv7`, `score3`, ..., `up8`.

    Attributes:
      classes: number of classes.
      width: channels of the two convolutions in place of VGG's hidden layers.
      dtype: type of the computation.
      param_dtype: type of the parameters.
      checkpoint: wrap each convolution and its ReLU in `jax.checkpoint`.
    """

    classes: int
    width: int = 4096
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, h, w, classes] of images [n, h, w, c] of any floating type.

        Raises:
          ValueError: the sides are no multiples of 32 pixels.
        """
        if x.shape[1] % 32 or x.shape[2] % 32:
            raise ValueError(
                f"FCN-8s needs images whose sides are multiples of 32 pixels, not {x.shape[1:3]}."
            )
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        layer = nn.remat(ConvRelu) if self.checkpoint else ConvRelu

        def score(x: jax.Array, name: str) -> jax.Array:
            return nn.Conv(self.classes, (1, 1), kernel_init=LECUN, name=name, **types)(x)

        def up(x: jax.Array, factor: int, name: str) -> jax.Array:
            kernel, strides = (2 * factor, 2 * factor), (factor, factor)
            return nn.ConvTranspose(
                self.classes, kernel, strides, use_bias=False, kernel_init=LECUN, name=name, **types
            )(x)

        x = x.astype(self.dtype)
        pooled = []
        for stage, (channels, convs) in enumerate(vgg_stages(16), start=1):
            for index in range(1, convs + 1):
                x = layer(channels, name=f"stage{stage}_layer{index}", **types)(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
            pooled.append(x)
        x = layer(self.width, kernel=7, name="conv6", **types)(x)
        x = layer(self.width, kernel=1, name="conv7", **types)(x)
        x = up(score(x, "score5"), 2, "up5") + score(pooled[3], "score4")
        x = up(x, 2, "up4") + score(pooled[2], "score3")
        return up(x, 8, "up8").astype(jnp.float32)
