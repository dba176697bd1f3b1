"""A vision transformer of Flax's layers: weights float32, computed in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

_DTYPE = jnp.bfloat16


class Block(nn.Module):
    """A pre-normalised layer, with dropout of the attention weights and behind each product.

    Attributes:
      rate: share of what is dropped.
    """

    rate: float = 0.1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, tokens, width] -> the same; heads are 64 wide."""
        width = x.shape[-1]
        dropped = lambda x: nn.Dropout(self.rate, deterministic=False)(x)
        y = nn.LayerNorm(dtype=_DTYPE)(x)
        y = nn.MultiHeadDotProductAttention(
            width // 64, dtype=_DTYPE, dropout_rate=self.rate, deterministic=False
        )(y, y)
        x = x + dropped(y)
        y = nn.Dense(4 * width, dtype=_DTYPE)(nn.LayerNorm(dtype=_DTYPE)(x))
        y = nn.Dense(width, dtype=_DTYPE)(dropped(nn.gelu(y)))
        return x + dropped(y)


class ViT(nn.Module):
    """ViT-L/16 (Dosovitskiy et al., "An image is worth 16x16 words", 2021, Table 1).

    Attributes:
      layers, width: of the network.
      block: makes a layer: `Block`, or what `nn.remat` makes of it.
    """

    layers: int = 24
    width: int = 1024
    block: Callable[[], nn.Module] = Block

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """[n, 224, 224, 3] -> the logits of 1,000 classes, f32[n, 1000]."""
        n = images.shape[0]
        x = nn.Conv(self.width, (16, 16), (16, 16), dtype=_DTYPE)(images)
        x = x.reshape(n, -1, self.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(token, (n, 1, self.width)).astype(_DTYPE), x], 1)
        places = self.param("places", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = nn.Dropout(0.1, deterministic=False)(x + places.astype(_DTYPE))
        for _ in range(self.layers):
            x = self.block()(x)
        x = nn.LayerNorm(dtype=_DTYPE)(x)[:, 0]
        return nn.Dense(1000)(x.astype(jnp.float32))
