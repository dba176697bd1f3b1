"""Layers that several networks share, in Flax Linen."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.initialisers import drawn_in_float32

HE = drawn_in_float32(jax.nn.initializers.variance_scaling(2.0, "fan_in", "normal"))
LECUN = drawn_in_float32(jax.nn.initializers.lecun_normal())


def batch_norm(train: bool, dtype: Any, name: str | None = None) -> nn.BatchNorm:
    """Batch norm; statistics, scale and bias stay in float32 whatever the type of the computation.

    Args:
      train: normalise by the batch's statistics and not by the running ones.
      dtype: type of the computation and of the result.
    """
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        epsilon=1e-5,
        dtype=dtype,
        param_dtype=jnp.float32,
        name=name,
    )


class ConvOHWI(nn.Module):
    """A convolution without bias, "SAME": [n, h, w, c] -> `dtype`[n, h/stride, w/stride, channels].

    The kernel is [channels, height, width, c], as cuDNN wants it, in place of Flax's [height, width,
    c, channels]. Of layers in a loop XLA would transpose the whole stack of kernels in front of it,
    and hold that besides.

    Attributes:
      channels: output channels.
      kernel: height and width.
      strides: of both spatial dimensions.
      dtype: type of the computation and of the result.
      param_dtype: type of the kernel.
      kernel_init: draws the kernel.
    """

    channels: int
    kernel: tuple[int, int]
    strides: int = 1
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Any = HE

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.channels, *self.kernel, x.shape[-1])
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        return jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            (self.strides, self.strides),
            "SAME",
            dimension_numbers=("NHWC", "OHWI", "NHWC"),
        )


class ConvRelu(nn.Module):
    """A convolution with bias or batch norm, then ReLU: [n, h, w, c] -> `dtype`[n, h', w', channels].

    Submodules: `conv`, and `norm` with batch norm.

    Attributes:
      channels: output channels.
      kernel, stride: of both spatial dimensions, or one for each.
      padding: as that of `nn.Conv`.
      norm: batch norm in place of the bias; its statistics, scale and bias are float32.
      train: normalise by the batch's statistics and not by the running ones.
      dtype: type of the computation and of the result.
      param_dtype: type of the kernel and the bias.
      kernel_init: draws the kernel.
    """

    channels: int
    kernel: int | Sequence[int] = 3
    stride: int = 1
    padding: Any = "SAME"
    norm: bool = False
    train: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Any = HE

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = (self.kernel,) * 2 if isinstance(self.kernel, int) else tuple(self.kernel)
        x = nn.Conv(
            self.channels,
            kernel,
            strides=self.stride,
            padding=self.padding,
            use_bias=not self.norm,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            name="conv",
        )(x)
        if self.norm:
            x = batch_norm(self.train, self.dtype, "norm")(x)
        return nn.relu(x)


class Head(nn.Module):
    """Fully connected ReLU layers, then the classifier: [n, ...] -> f32[n, classes].

    Submodules: `hidden1`, `hidden2`, ..., `classifier`. Raises ValueError if there is nothing of an
    image left.

    Attributes:
      widths: of the hidden layers.
      classes: number of classes.
      dtype: type of the computation.
      param_dtype: type of the parameters.
    """

    widths: Sequence[int]
    classes: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        if 0 in x.shape:
            raise ValueError("the images are too small for this network: nothing is left of them.")
        x = x.reshape(x.shape[0], -1)
        for index, width in enumerate(self.widths, start=1):
            x = nn.relu(nn.Dense(width, kernel_init=HE, name=f"hidden{index}", **types)(x))
        x = nn.Dense(self.classes, kernel_init=LECUN, name="classifier", **types)(x)
        return x.astype(jnp.float32)
