"""Swin transformers, in Flax Linen (Liu et al., "Swin transformer: Hierarchical vision transformer
using shifted windows", ICCV 2021), without stochastic depth."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vmem_jax.models.initialisers import drawn_in_float32

_NORMAL = drawn_in_float32(jax.nn.initializers.normal(0.02))

WINDOW = 7
"""Tokens on each side of a window."""


class Size(NamedTuple):
    """Channels of the first stage, which every other one doubles, and blocks of each stage."""

    width: int
    blocks: tuple[int, int, int, int]


SIZES = {  # section 3.3
    "t": Size(96, (2, 2, 6, 2)),
    "s": Size(96, (2, 2, 18, 2)),
    "b": Size(128, (2, 2, 18, 2)),
}


def in_windows(x: jax.Array) -> jax.Array:
    """[n, h, w, c] -> [n · windows, WINDOW², c]."""
    n, h, w, c = x.shape
    x = x.reshape(n, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW**2, c)


def from_windows(x: jax.Array, h: int, w: int) -> jax.Array:
    """The inverse of `in_windows`: [n · windows, WINDOW², c] -> [n, h, w, c]."""
    c = x.shape[-1]
    x = x.reshape(-1, h // WINDOW, w // WINDOW, WINDOW, WINDOW, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, h, w, c)


def _relative() -> np.ndarray:
    """For each pair of tokens of a window the index of their offset, i32[WINDOW², WINDOW²]."""
    at = np.stack(np.meshgrid(np.arange(WINDOW), np.arange(WINDOW), indexing="ij"), -1)
    offset = at.reshape(-1, 1, 2) - at.reshape(1, -1, 2) + WINDOW - 1
    return offset[..., 0] * (2 * WINDOW - 1) + offset[..., 1]


def _apart(h: int, w: int, shift: int) -> np.ndarray:
    """Whether two tokens of a window came together by the shift alone, bool[windows, WINDOW²,
    WINDOW²]."""
    side = lambda n: np.digitize(np.arange(n), [n - WINDOW, n - shift])
    whole: np.ndarray = 3 * side(h)[:, None] + side(w)
    split = whole.reshape(h // WINDOW, WINDOW, w // WINDOW, WINDOW)
    region = split.transpose(0, 2, 1, 3).reshape(-1, WINDOW**2)
    return region[:, :, None] != region[:, None, :]


class Block(nn.Module):
    """Attention within windows, shifted or not, and a perceptron: [n, h, w, c] -> the same in
    `dtype`; h and w are multiples of `WINDOW`.

    Attributes:
      shift: tokens by which the windows are shifted; 0 for none.
      dtype: type of the computation and of the result.
      param_dtype: type of the parameters.
    """

    shift: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = lambda name: nn.LayerNorm(dtype=self.dtype, param_dtype=jnp.float32, name=name)
        _, h, w, c = x.shape
        y = norm("norm1")(x)
        y = jnp.roll(y, (-self.shift, -self.shift), (1, 2)) if self.shift else y
        y = from_windows(self.attention(in_windows(y), h, w), h, w)
        y = jnp.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y
        x = x + y
        y = nn.gelu(nn.Dense(4 * c, name="up", **types)(norm("norm2")(x)))
        return x + nn.Dense(c, name="down", **types)(y)

    def attention(self, x: jax.Array, h: int, w: int) -> jax.Array:
        """Within each window of x[windows, tokens, c], in heads of 32 channels."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        count, tokens, c = x.shape
        heads = c // 32
        y = nn.Dense(3 * c, name="qkv", **types)(x)
        q, k, v = y.reshape(count, tokens, 3, heads, 32).transpose(2, 0, 3, 1, 4)
        table = self.param("bias", _NORMAL, ((2 * WINDOW - 1) ** 2, heads), self.param_dtype)
        scores = (q @ k.swapaxes(-1, -2)).astype(jnp.float32) * 32**-0.5
        scores += table[_relative()].transpose(2, 0, 1).astype(jnp.float32)
        if self.shift:
            apart = _apart(h, w, self.shift)[:, None]  # of the windows of an image
            shape = (-1, len(apart), heads, tokens, tokens)
            scores = jnp.where(apart, -1e9, scores.reshape(shape)).reshape(scores.shape)
        y = jax.nn.softmax(scores).astype(self.dtype) @ v
        y = y.transpose(0, 2, 1, 3).reshape(count, tokens, c)
        return nn.Dense(c, name="out", **types)(y)


class Swin(nn.Module):
    """A Swin transformer with patches of 4 by 4 pixels and windows of 7 by 7.

    Submodules: `patches`, `patches_norm`, `stage1_block1`, ..., `merge2_norm`, `merge2`, ..., `norm`,
    `head`.

    Attributes:
      size: one of `SIZES`.
      classes: number of classes.
      dtype: type of the computation.
      param_dtype: type of the parameters.
      checkpoint: wrap each block in `jax.checkpoint`.
    """

    size: str
    classes: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images f32[n, h, w, c]; h and w are multiples of 224."""
        del train
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = lambda name: nn.LayerNorm(dtype=self.dtype, param_dtype=jnp.float32, name=name)
        block, size = nn.remat(Block) if self.checkpoint else Block, SIZES[self.size]
        x = nn.Conv(size.width, (4, 4), strides=4, padding="VALID", name="patches", **types)(x)
        x = norm("patches_norm")(x)
        for s, blocks in enumerate(size.blocks, start=1):
            if s > 1:
                n, h, w, c = x.shape
                x = x.reshape(n, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
                x = norm(f"merge{s}_norm")(x.reshape(n, h // 2, w // 2, 4 * c))
                x = nn.Dense(2 * c, use_bias=False, name=f"merge{s}", **types)(x)
            for i in range(blocks):
                shift = WINDOW // 2 if i % 2 and x.shape[1] > WINDOW else 0
                x = block(shift, name=f"stage{s}_block{i + 1}", **types)(x)
        x = norm("norm")(x).mean((1, 2))
        return nn.Dense(self.classes, name="head", **types)(x).astype(jnp.float32)
