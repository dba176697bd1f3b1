"""A vision transformer, in Flax Linen.

Dosovitskiy et al., "An image is worth 16x16 words: Transformers for image recognition at scale"
(ICLR 2021), with the mean over the patches in place of a class token, as in Beyer, Zhai and
Kolesnikov, "Better plain ViT baselines for ImageNet-1k" (2022).
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.gpt import Block, checkpointed
from vmem_jax.models.initialisers import drawn_in_float32

_NORMAL = drawn_in_float32(jax.nn.initializers.normal(0.02))


class ViT(nn.Module):
    """A vision transformer with patches of 16 by 16 pixels.

    Submodules: `patches`, `block1`, ..., `norm`, `head`; and the parameter `positions`.

    Attributes:
      layers: blocks.
      width: of the residual stream; heads are 64 wide.
      classes: number of classes.
      dropout: share of what training drops, of attention weights, too, 0 to 1; above 0 a train step
        needs `rngs={"dropout": key}`.
      dtype: type of the computation.
      param_dtype: type of the parameters.
      checkpoint: wrap each block in `jax.checkpoint`.
      policy: of `jax.checkpoint`: what it saves; None for nothing.
    """

    layers: int
    width: int
    classes: int
    dropout: float = 0.1
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    checkpoint: bool = False
    policy: Callable[..., Any] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images f32[n, h, w, c], h and w multiples of 16."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        block = checkpointed(self.policy) if self.checkpoint else Block
        y = nn.Conv(self.width, (16, 16), strides=16, name="patches", **types)(x)
        y = y.reshape(y.shape[0], -1, self.width)
        positions = self.param("positions", _NORMAL, (1, *y.shape[1:]), self.param_dtype)
        y = nn.Dropout(self.dropout, deterministic=not train)(y + positions.astype(self.dtype))
        for index in range(1, self.layers + 1):
            y = block(
                heads=self.width // 64,
                dropout=self.dropout,
                train=train,
                causal=False,
                name=f"block{index}",
                **types,
            )(y)
        y = nn.LayerNorm(dtype=self.dtype, param_dtype=jnp.float32, name="norm")(y)
        return nn.Dense(self.classes, name="head", **types)(y.mean(1)).astype(jnp.float32)
