"""Inception-v4, in Flax Linen.

Szegedy et al., "Inception-v4, Inception-ResNet and the impact of residual connections on learning"
(AAAI 2017), Figures 3 to 9, without dropout.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.layers import ConvRelu, Head


class Conv(NamedTuple):
    """A convolution with batch norm and ReLU; without padding where it is `valid`."""

    channels: int
    kernel: int | tuple[int, int]
    stride: int = 1
    valid: bool = False


class Pool(NamedTuple):
    """A 3x3 pooling: the maximum at stride 2 without padding, or the mean at stride 1."""

    maximum: bool


class Branches(NamedTuple):
    """Paths side by side; their results are put together along the channels."""

    paths: tuple[Any, ...]


Path = tuple[Any, ...]
"""What is done one after the other: `Conv`, `Pool` or `Branches`."""


def branches(*paths: Path) -> Branches:
    return Branches(paths)


MAXIMUM, MEAN = Pool(True), Pool(False)

STEM: Path = (
    Conv(32, 3, 2, valid=True),
    Conv(32, 3, valid=True),
    Conv(64, 3),
    branches((MAXIMUM,), (Conv(96, 3, 2, valid=True),)),
    branches(
        (Conv(64, 1), Conv(96, 3, valid=True)),
        (Conv(64, 1), Conv(64, (7, 1)), Conv(64, (1, 7)), Conv(96, 3, valid=True)),
    ),
    branches((Conv(192, 3, 2, valid=True),), (MAXIMUM,)),
)
MODULE_A: Path = (
    branches(
        (MEAN, Conv(96, 1)),
        (Conv(96, 1),),
        (Conv(64, 1), Conv(96, 3)),
        (Conv(64, 1), Conv(96, 3), Conv(96, 3)),
    ),
)
REDUCTION_A: Path = (
    branches(
        (MAXIMUM,),
        (Conv(384, 3, 2, valid=True),),
        (Conv(192, 1), Conv(224, 3), Conv(256, 3, 2, valid=True)),
    ),
)
MODULE_B: Path = (
    branches(
        (MEAN, Conv(128, 1)),
        (Conv(384, 1),),
        (Conv(192, 1), Conv(224, (1, 7)), Conv(256, (7, 1))),
        (
            Conv(192, 1),
            Conv(192, (1, 7)),
            Conv(224, (7, 1)),
            Conv(224, (1, 7)),
            Conv(256, (7, 1)),
        ),
    ),
)
REDUCTION_B: Path = (
    branches(
        (MAXIMUM,),
        (Conv(192, 1), Conv(192, 3, 2, valid=True)),
        (Conv(256, 1), Conv(256, (1, 7)), Conv(320, (7, 1)), Conv(320, 3, 2, valid=True)),
    ),
)
_BOTH = branches((Conv(256, (1, 3)),), (Conv(256, (3, 1)),))
MODULE_C: Path = (
    branches(
        (MEAN, Conv(256, 1)),
        (Conv(256, 1),),
        (Conv(384, 1), _BOTH),
        (Conv(384, 1), Conv(448, (1, 3)), Conv(512, (3, 1)), _BOTH),
    ),
)
MODULES: dict[str, Path] = {
    "stem": STEM,
    **{f"inceptionA{i}": MODULE_A for i in range(1, 5)},
    "reductionA": REDUCTION_A,
    **{f"inceptionB{i}": MODULE_B for i in range(1, 8)},
    "reductionB": REDUCTION_B,
    **{f"inceptionC{i}": MODULE_C for i in range(1, 4)},
}


class Module(nn.Module):
    """One module: [n, h, w, c] -> `dtype`[n, h', w', c']. Submodules: `conv1`, `conv2`, ...

    Attributes:
      does: one after the other.
      train: normalise by the batch's statistics and not by the running ones.
      dtype: type of the computation and of the result.
      param_dtype: type of the kernels; batch norm's own stay float32.
    """

    does: Path
    train: bool
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        count = 0

        def run(x: jax.Array, path: Path) -> jax.Array:
            nonlocal count
            for part in path:
                if isinstance(part, Branches):
                    x = jnp.concatenate([run(x, side) for side in part.paths], axis=-1)
                elif isinstance(part, Conv):
                    count += 1
                    x = ConvRelu(
                        part.channels,
                        kernel=part.kernel,
                        stride=part.stride,
                        padding="VALID" if part.valid else "SAME",
                        norm=True,
                        train=self.train,
                        dtype=self.dtype,
                        param_dtype=self.param_dtype,
                        name=f"conv{count}",
                    )(x)
                elif part.maximum:
                    x = nn.max_pool(x, (3, 3), strides=(2, 2))
                else:
                    x = nn.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME")
            return x

        return run(x, self.does)


class InceptionV4(nn.Module):
    """Inception-v4 (Szegedy et al., AAAI 2017). Images of 299x299 pixels; 75 are the least.

    Submodules: `stem/conv1`, ..., `inceptionA1`, ..., `reductionA`, ..., `head/classifier`.

    Attributes:
      classes: number of classes.
      dtype: type of the computation.
      param_dtype: type of the parameters.
      checkpoint: wrap each module in `jax.checkpoint`.
    """

    classes: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images [n, h, w, c] of any floating type."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        module = nn.remat(Module) if self.checkpoint else Module
        x = x.astype(self.dtype)
        for name, path in MODULES.items():
            x = module(path, train=train, name=name, **types)(x)
        return Head((), self.classes, name="head", **types)(x.mean(axis=(1, 2)))
