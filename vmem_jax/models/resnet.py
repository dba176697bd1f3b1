"""Residual networks of any depth, in Flax Linen.

The ImageNet forms (18, 34, 50, 101, 152) are those of He et al., "Deep residual learning for image
recognition" (CVPR 2016), with the stride of a bottleneck on its 3x3 convolution ("v1.5"). The
CIFAR forms of depth 9n + 2, ResNet-1001 among them, are the pre-activation bottleneck networks of
He et al., "Identity mappings in deep residual networks" (ECCV 2016).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.initialisers import drawn_in_float32
from vmem_jax.models.layers import ConvOHWI, batch_norm


class ResNetBlocks(NamedTuple):
    """How the blocks of a residual network are laid out.

    Attributes:
      blocks: residual blocks in each stage.
      bottleneck: 1x1, 3x3, 1x1 blocks with four times the channels at the end, or two 3x3.
      cifar: the pre-activation CIFAR form: 16 channels wide, 3x3 stem at every image size.
    """

    blocks: tuple[int, ...]
    bottleneck: bool
    cifar: bool


_IMAGENET = {
    18: ResNetBlocks((2, 2, 2, 2), bottleneck=False, cifar=False),
    34: ResNetBlocks((3, 4, 6, 3), bottleneck=False, cifar=False),
    50: ResNetBlocks((3, 4, 6, 3), bottleneck=True, cifar=False),
    101: ResNetBlocks((3, 4, 23, 3), bottleneck=True, cifar=False),
    152: ResNetBlocks((3, 8, 36, 3), bottleneck=True, cifar=False),
}


def resnet_blocks(depth: int) -> ResNetBlocks:
    """Returns the layout of ResNet-`depth`.

    Args:
      depth: 18, 34, 50, 101 or 152 for the ImageNet form; any other 9n + 2 (11, 164, 1001, ...)
        for the pre-activation CIFAR form of three stages of n bottleneck blocks. 101 is both, and
        gives the ImageNet form.

    Raises:
      ValueError: for any other depth.
    """
    if depth in _IMAGENET:
        return _IMAGENET[depth]
    if depth >= 11 and (depth - 2) % 9 == 0:
        return ResNetBlocks(((depth - 2) // 9,) * 3, bottleneck=True, cifar=True)
    raise ValueError(
        f"There is no ResNet-{depth}: the depth is {', '.join(map(str, _IMAGENET))} (ImageNet "
        "form), or 9n + 2 for a whole n >= 1 (11, 20, ..., 164, 1001, ...; CIFAR form)."
    )


class _Layers(NamedTuple):
    """Constructors of the layers that all blocks share."""

    conv: Callable[..., nn.Module]
    norm: Callable[..., nn.BatchNorm]


def resnet_layers(dtype: Any, param_dtype: Any, train: bool, ohwi: bool = False) -> _Layers:
    """The layers of residual networks, by `ohwi` with kernels as cuDNN wants them."""
    types = {"dtype": dtype, "param_dtype": param_dtype}
    norm = partial(batch_norm, train, dtype)
    if ohwi:
        fan_out = jax.nn.initializers.variance_scaling(
            2.0, "fan_out", "normal", in_axis=-1, out_axis=0
        )
        return _Layers(partial(ConvOHWI, kernel_init=drawn_in_float32(fan_out), **types), norm)
    he = drawn_in_float32(jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal"))
    return _Layers(
        conv=partial(
            nn.Conv,
            padding="SAME",
            use_bias=False,
            kernel_init=he,
            **types,
        ),
        norm=norm,
    )


class ResidualBlock(nn.Module):
    """One residual block: [n, h, w, c] -> `dtype`[n, h/stride, w/stride, out].

    `out` is `channels`, or 4 `channels` for a bottleneck. Submodules: `conv1`..`conv3`,
    `norm1`..`norm3`, and `shortcut_conv`, `shortcut_norm` where the shape changes.

    Attributes:
      channels: channels of the 3x3 convolutions.
      stride: stride of the (first) 3x3 convolution.
      bottleneck: 1x1, 3x3, 1x1 in place of two 3x3.
      preactivation: batch norm and ReLU before each convolution (ECCV 2016) and not after it.
      train: normalise by the batch's statistics and not by the running ones.
      dtype: type of the computation and of the result.
      param_dtype: type of the kernels.
      ohwi: kernels as cuDNN wants them (`ConvOHWI`).
    """

    channels: int
    stride: int
    bottleneck: bool
    preactivation: bool
    train: bool
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    ohwi: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv, norm = resnet_layers(self.dtype, self.param_dtype, self.train, self.ohwi)
        if self.bottleneck:
            plan = [
                (self.channels, 1, 1),
                (self.channels, 3, self.stride),
                (self.channels * 4, 1, 1),
            ]
        else:
            plan = [(self.channels, 3, self.stride), (self.channels, 3, 1)]
        out = plan[-1][0]
        project = self.stride != 1 or x.shape[-1] != out

        def shortcut(y: jax.Array) -> jax.Array:
            return conv(out, (1, 1), strides=self.stride, name="shortcut_conv")(y)

        y = x
        if self.preactivation:
            for index, (channels, size, stride) in enumerate(plan, start=1):
                y = nn.relu(norm(name=f"norm{index}")(y))
                if index == 1 and project:
                    x = shortcut(y)
                y = conv(channels, (size, size), strides=stride, name=f"conv{index}")(y)
            return x + y
        for index, (channels, size, stride) in enumerate(plan, start=1):
            y = conv(channels, (size, size), strides=stride, name=f"conv{index}")(y)
            y = norm(name=f"norm{index}")(y)
            if index < len(plan):
                y = nn.relu(y)
        if project:
            x = norm(name="shortcut_norm")(shortcut(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network (He et al., CVPR 2016 v1.5; pre-activation: He et al., ECCV 2016).

    Submodules: `stem_conv`, `stem_norm`, `stage1_block2/conv3`, ..., `final_norm` with
    pre-activation, `classifier`. Collections: `params` and `batch_stats` (float32).

    Attributes:
      blocks: residual blocks in each stage; each stage after the first halves the image.
      bottleneck: 1x1, 3x3, 1x1 blocks in place of two 3x3.
      classes: number of classes.
      dtype: type of the computation; batch norm's statistics are float32 regardless.
      param_dtype: type of the kernels and the classifier; batch norm's own stay float32.
      width: channels of the stem and of the first stage's 3x3 convolutions (CIFAR form: 16).
      cifar_stem: a 3x3 stem without pooling, for small images, in place of 7x7/2 and 3x3/2
        max-pool.
      preactivation: batch norm and ReLU before each convolution.
      checkpoint: wrap each residual block in `nn.remat`, that is `jax.checkpoint`: only the block's
        input is kept for the backward pass. Parameters and their names do not change.
    """

    blocks: tuple[int, ...]
    bottleneck: bool
    classes: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    width: int = 64
    cifar_stem: bool = False
    preactivation: bool = False
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images [n, h, w, c] of any floating type.

        With `train` the collection `batch_stats` has to be mutable.
        """
        conv, norm = resnet_layers(self.dtype, self.param_dtype, train)
        size, stride = (3, 1) if self.cifar_stem else (7, 2)
        x = x.astype(self.dtype)
        x = conv(self.width, (size, size), strides=stride, name="stem_conv")(x)
        if not self.preactivation:
            x = nn.relu(norm(name="stem_norm")(x))
        if not self.cifar_stem:
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        block = nn.remat(ResidualBlock) if self.checkpoint else ResidualBlock
        for stage, count in enumerate(self.blocks):
            for index in range(count):
                x = block(
                    channels=self.width * 2**stage,
                    stride=2 if stage > 0 and index == 0 else 1,
                    bottleneck=self.bottleneck,
                    preactivation=self.preactivation,
                    train=train,
                    dtype=self.dtype,
                    param_dtype=self.param_dtype,
                    name=f"stage{stage + 1}_block{index + 1}",
                )(x)
        if self.preactivation:
            x = nn.relu(norm(name="final_norm")(x))
        x = x.mean(axis=(1, 2))
        x = nn.Dense(
            self.classes,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=drawn_in_float32(jax.nn.initializers.lecun_normal()),
            name="classifier",
        )(x)
        return x.astype(jnp.float32)
