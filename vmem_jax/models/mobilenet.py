"""MobileNetV2, in Flax Linen (Sandler et al., "MobileNetV2: Inverted residuals and linear
bottlenecks", CVPR 2018), without dropout."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.layers import HE, Head, batch_norm


class Stage(NamedTuple):
    """Blocks of equal width: the first one has the stride."""

    expansion: int
    channels: int
    blocks: int
    stride: int


STAGES = (  # Table 2
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """A 1x1 convolution to more channels, a depthwise 3x3 and a 1x1 to fewer: [n, h, w, c] ->
    `dtype`[n, h/stride, w/stride, channels]; added to its input where both have one shape.

    Submodules: `expand` and `expand_norm`, unless `expansion` is 1, `depthwise`, `depthwise_norm`,
    `project`, `project_norm`.

    Attributes:
      channels: of the result.
      expansion: of the channels inside, over those of the input.
      stride: of the depthwise convolution.
      train: normalise by the batch's statistics and not by the running ones.
      dtype: type of the computation and of the result.
      param_dtype: type of the kernels.
    """

    channels: int
    expansion: int
    stride: int = 1
    train: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inside = self.expansion * x.shape[-1]

        def normed(y: jax.Array, name: str, channels: int, kernel: int = 1, **options: Any) -> Any:
            types = {"dtype": self.dtype, "param_dtype": self.param_dtype, "kernel_init": HE}
            conv = nn.Conv(
                channels, (kernel, kernel), use_bias=False, name=name, **options, **types
            )
            return batch_norm(self.train, self.dtype, f"{name}_norm")(conv(y))

        y = nn.relu6(normed(x, "expand", inside)) if self.expansion > 1 else x
        strided = {"strides": self.stride, "feature_group_count": inside}
        y = nn.relu6(normed(y, "depthwise", inside, 3, **strided))
        y = normed(y, "project", self.channels)
        return x + y if x.shape == y.shape else y


class MobileNetV2(nn.Module):
    """MobileNetV2 of width 1 (Sandler et al., CVPR 2018, Table 2).

    Submodules: `stem`, `stem_norm`, `stage1_block1`, ..., `last`, `last_norm`, `head/classifier`.

    Attributes:
      classes: number of classes.
      dtype: type of the computation.
      param_dtype: type of the kernels and the classifier.
      checkpoint: wrap each block in `jax.checkpoint`.
    """

    classes: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images [n, h, w, c] of any floating type."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        plain = {"use_bias": False, "kernel_init": HE, **types}
        block = nn.remat(InvertedResidual) if self.checkpoint else InvertedResidual
        norm = lambda name: batch_norm(train, self.dtype, name)
        x = nn.Conv(32, (3, 3), strides=2, name="stem", **plain)(x.astype(self.dtype))
        x = nn.relu6(norm("stem_norm")(x))
        for s, stage in enumerate(STAGES, start=1):
            for i in range(1, stage.blocks + 1):
                stride = stage.stride if i == 1 else 1
                about = (stage.channels, stage.expansion, stride, train)
                x = block(*about, name=f"stage{s}_block{i}", **types)(x)
        x = nn.relu6(norm("last_norm")(nn.Conv(1280, (1, 1), name="last", **plain)(x)))
        return Head((), self.classes, name="head", **types)(x.mean(axis=(1, 2)))
