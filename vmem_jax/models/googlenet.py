"""GoogLeNet, in Flax Linen (Szegedy et al., "Going deeper with convolutions", CVPR 2015).

Without the auxiliary classifiers and local response normalisation.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.layers import ConvRelu, Head


class Widths(NamedTuple):
    """Channels of an inception module's convolutions; those before 3x3 and 5x5 are 1x1."""

    one: int
    before_three: int
    three: int
    before_five: int
    five: int
    after_pool: int


MODULES: dict[str, Widths | None] = {  # Table 1; None is a 3x3/2 max-pool
    "3a": Widths(64, 96, 128, 16, 32, 32),
    "3b": Widths(128, 128, 192, 32, 96, 64),
    "pool3": None,
    "4a": Widths(192, 96, 208, 16, 48, 64),
    "4b": Widths(160, 112, 224, 24, 64, 64),
    "4c": Widths(128, 128, 256, 24, 64, 64),
    "4d": Widths(112, 144, 288, 32, 64, 64),
    "4e": Widths(256, 160, 320, 32, 128, 128),
    "pool4": None,
    "5a": Widths(256, 160, 320, 32, 128, 128),
    "5b": Widths(384, 192, 384, 48, 128, 128),
}


class Inception(nn.Module):
    """Four branches side by side, along the channels: [n, h, w, c] -> `dtype`[n, h, w, c'].

    Attributes:
      widths: of the branches.
      dtype: type of the computation and of the result.
      param_dtype: type of the parameters.
    """

    widths: Widths
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv(channels: int, kernel: int, name: str) -> ConvRelu:
            types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
            return ConvRelu(channels, kernel=kernel, name=name, **types)

        w = self.widths
        pooled = nn.max_pool(x, (3, 3), strides=(1, 1), padding="SAME")
        branches = [
            conv(w.one, 1, "one")(x),
            conv(w.three, 3, "three")(conv(w.before_three, 1, "before_three")(x)),
            conv(w.five, 5, "five")(conv(w.before_five, 1, "before_five")(x)),
            conv(w.after_pool, 1, "after_pool")(pooled),
        ]
        return jnp.concatenate(branches, axis=-1)


class GoogLeNet(nn.Module):
    """GoogLeNet (Szegedy et al., CVPR 2015, Table 1).

    Submodules: `stem1`..`stem3`, `inception3a`, ..., `head/classifier`.

    Attributes:
      classes: number of classes.
      dtype: type of the computation.
      param_dtype: type of the parameters.
      checkpoint: wrap each inception module in `jax.checkpoint`.
    """

    classes: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Returns logits f32[n, classes] of images [n, h, w, c] of any floating type."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        inception = nn.remat(Inception) if self.checkpoint else Inception
        pool = lambda x: nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        x = x.astype(self.dtype)
        x = pool(ConvRelu(64, kernel=7, stride=2, name="stem1", **types)(x))
        x = ConvRelu(64, kernel=1, name="stem2", **types)(x)
        x = pool(ConvRelu(192, kernel=3, name="stem3", **types)(x))
        for name, widths in MODULES.items():
            x = (
                pool(x)
                if widths is None
                else inception(widths, name=f"inception{name}", **types)(x)
            )
        return Head((), self.classes, name="head", **types)(x.mean(axis=(1, 2)))
