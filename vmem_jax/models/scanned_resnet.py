"""Residual networks whose identical blocks run in loops, so that depth costs no compilation.

A stage of n blocks is its first one, which changes the shape, and n - 1 that are alike: one
`lax.scan` over their stacked parameters, each block under `jax.checkpoint`. The backward pass then
needs the inputs of all blocks. In a long stage these are in a loop of loops, both checkpointed, which
keeps about the square root of them (Chen et al., "Training deep nets with sublinear memory cost",
2016, section 4.1), for one more forward pass.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.initialisers import drawn_in_float32
from vmem_jax.models.resnet import ResidualBlock, resnet_layers


def loops_of(blocks: int, most: int) -> tuple[int, int, int]:
    """(outer, inner, rest): `blocks` as a loop of `outer` loops of `inner` blocks, and `rest` more.

    Up to `most` blocks are one loop: (0, 0, blocks). Of more `inner` is near the square root, where
    the fewest are left over: (35, 17, 0) of 595.
    """
    if blocks <= most:
        return 0, 0, blocks
    root = math.isqrt(blocks)
    near = range(max(root - root // 3, 1), root + root // 3 + 1)
    inner = min(near, key=lambda n: (blocks % n, abs(n - root)))
    return blocks // inner, inner, blocks % inner


class _Body(nn.Module):
    """One block as the body of a loop: (x, None) -> (x, None)."""

    channels: int
    train: bool
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        block = ResidualBlock(
            channels=self.channels,
            stride=1,
            bottleneck=True,
            preactivation=False,
            train=self.train,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            ohwi=True,
            name="block",
        )
        return block(x), None


def _loop(body: Any, length: int) -> Any:
    """`length` times `body` over stacked parameters and statistics."""
    return nn.scan(
        body,
        variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True},
        length=length,
    )


class ScannedResNet(nn.Module):
    """The ImageNet bottleneck form of `ResNet`, with the identical blocks of each stage in a loop.

    Kernels are [out, height, width, in] (`ConvOHWI`). Submodules: `stem_conv`, `stem_norm`, and of
    each stage `stage1_block1`; `stage1_loops/block/conv1`, with stacks [outer, inner, ...], of a long
    one; `stage1_loop/block/conv1`, with stacks [n, ...], of what is left of it; `classifier`.
    Collections: `params` and `batch_stats` (float32).

    Attributes:
      blocks: residual blocks in each stage; each stage after the first halves the image.
      classes: number of classes.
      dtype: type of the computation; batch norm's statistics are float32 regardless.
      param_dtype: type of the kernels and the classifier; batch norm's own stay float32.
      width: channels of the stem and of the first stage's 3x3 convolutions.
      cifar_stem: a 3x3 stem without pooling, for small images, in place of 7x7/2 and 3x3/2
        max-pool.
      most: identical blocks of a stage that are one loop; more are a loop of loops.
      checkpoint: blocks, and the loops of a loop, are under `jax.checkpoint`.
      policy: what that keeps, as `jax.checkpoint` has it; None for nothing.
    """

    blocks: tuple[int, ...]
    classes: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    width: int = 64
    cifar_stem: bool = False
    most: int = 64
    checkpoint: bool = True
    policy: Callable[..., Any] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images [n, h, w, c] of any floating type.

        With `train` the collection `batch_stats` has to be mutable.
        """
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        wrap = partial(nn.remat, policy=self.policy) if self.checkpoint else lambda module: module
        conv, norm = resnet_layers(self.dtype, self.param_dtype, train, ohwi=True)
        size, stride = (3, 1) if self.cifar_stem else (7, 2)
        x = conv(self.width, (size, size), strides=stride, name="stem_conv")(x)
        x = nn.relu(norm(name="stem_norm")(x))
        if not self.cifar_stem:
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, count in enumerate(self.blocks):
            channels, name = self.width * 2**stage, f"stage{stage + 1}"
            x = wrap(ResidualBlock)(
                channels=channels,
                stride=2 if stage > 0 else 1,
                bottleneck=True,
                preactivation=False,
                train=train,
                ohwi=True,
                name=f"{name}_block1",
                **types,
            )(x)
            outer, inner, rest = loops_of(count - 1, self.most)
            same = {"channels": channels, "train": train, **types}
            if outer:
                loops = _loop(wrap(_loop(wrap(_Body), inner)), outer)
                x, _ = loops(**same, name=f"{name}_loops")(x, None)
            if rest:
                x, _ = _loop(wrap(_Body), rest)(**same, name=f"{name}_loop")(x, None)
        x = x.mean(axis=(1, 2))
        x = nn.Dense(
            self.classes,
            kernel_init=drawn_in_float32(jax.nn.initializers.lecun_normal()),
            name="classifier",
            **types,
        )(x)
        return x.astype(jnp.float32)
