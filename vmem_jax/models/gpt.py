"""A decoder-only transformer, in Flax Linen.

The form of Radford et al., "Language models are unsupervised multitask learners" (2019), GPT-2:
pre-normalised blocks, learned positions, GELU, output weights shared with the token embedding.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.initialisers import drawn_in_float32

_NORMAL = drawn_in_float32(jax.nn.initializers.normal(0.02))


class Block(nn.Module):
    """Self-attention and a feed-forward layer, each added: [n, t, width] -> the same.

    Attributes:
      heads: of the attention.
      dropout: share of what is dropped of attention weights and of either result.
      train: whether anything is dropped.
      causal: whether a token attends to itself and those before it alone.
      dtype: type of the computation and of the result.
      param_dtype: type of the parameters; layer norm's stay float32.
    """

    heads: int
    dropout: float
    train: bool
    causal: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = lambda name: nn.LayerNorm(dtype=self.dtype, param_dtype=jnp.float32, name=name)
        drop = nn.Dropout(self.dropout, deterministic=not self.train)
        width = x.shape[-1]
        mask = nn.make_causal_mask(x[..., 0], dtype=jnp.bool_) if self.causal else None
        y = nn.MultiHeadDotProductAttention(
            self.heads,
            kernel_init=_NORMAL,
            dropout_rate=self.dropout,
            deterministic=not self.train,
            name="attention",
            **types,
        )(norm("norm1")(x), mask=mask)
        x = x + drop(y)
        y = nn.Dense(4 * width, kernel_init=_NORMAL, name="up", **types)(norm("norm2")(x))
        y = nn.Dense(width, kernel_init=_NORMAL, name="down", **types)(nn.gelu(y))
        return x + drop(y)


def checkpointed(policy: Callable[..., Any] | None) -> type[Block]:
    """Block in `jax.checkpoint`.

    Args:
      policy: of `jax.checkpoint`: what it saves; None for nothing.
    """
    return nn.remat(Block, policy=policy)


class GPT(nn.Module):
    """A decoder-only transformer (Radford et al., 2019).

    Submodules: `tokens`, `positions`, `block1`, ..., `norm`.

    Attributes:
      layers: blocks.
      width: of the residual stream; heads are 64 wide.
      classes: size of the vocabulary.
      context: tokens in a sequence.
      dropout: share of what training drops, 0 to 1; above 0 a train step needs
        `rngs={"dropout": key}`.
      dtype: type of the computation.
      param_dtype: type of the parameters.
      checkpoint: wrap each block in `jax.checkpoint`.
      policy: of `jax.checkpoint`: what it saves; None for nothing.
    """

    layers: int
    width: int
    classes: int
    context: int
    dropout: float = 0.1
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    checkpoint: bool = False
    policy: Callable[..., Any] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, t, classes] of tokens i32[n, t], each of the token after it."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        block = checkpointed(self.policy) if self.checkpoint else Block
        tokens = nn.Embed(self.classes, self.width, embedding_init=_NORMAL, name="tokens", **types)
        positions = nn.Embed(
            self.context, self.width, embedding_init=_NORMAL, name="positions", **types
        )
        y = tokens(x) + positions(jnp.arange(x.shape[1]))
        y = nn.Dropout(self.dropout, deterministic=not train)(y)
        for index in range(1, self.layers + 1):
            y = block(
                heads=self.width // 64,
                dropout=self.dropout,
                train=train,
                name=f"block{index}",
                **types,
            )(y)
        y = nn.LayerNorm(dtype=self.dtype, param_dtype=jnp.float32, name="norm")(y)
        return tokens.attend(y).astype(jnp.float32)
