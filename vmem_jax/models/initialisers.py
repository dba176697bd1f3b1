"""Initialisation that survives bfloat16 parameters and hundreds of layers without batch norm."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def drawn_in_float32(
    initialiser: jax.nn.initializers.Initializer,
) -> jax.nn.initializers.Initializer:
    """Returns `initialiser`, drawing in float32 and rounding to the type asked for.

    Normal numbers drawn in bfloat16 have a mean of about -0.01 standard deviations. ReLU's results
    are all positive, so the thousands of inputs of a 3x3 convolution add that up to the size of the
    signal, and VGG-116 starts with activations of 1e-10.
    """

    def draw(
        key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32, out_sharding: Any = None
    ) -> jax.Array:
        return initialiser(key, shape, jnp.float32, out_sharding=out_sharding).astype(dtype)

    return draw


def padding_aware_he(height: int, width: int) -> jax.nn.initializers.Initializer:
    """He initialisation of a 3x3 "SAME" convolution, corrected for the zeros of the padding.

    He et al., "Delving deep into rectifiers" (ICCV 2015), keep E[x^2] from layer to layer when all
    nine taps see data. Near an edge some see zeros. Over many layers of one image size E[x^2]
    then falls by a fixed factor each: the largest eigenvalue of the tridiagonal matrix of ones
    over three, (1 + 2 cos(pi / (n + 1))) / 3, for each side n. That is 0.985 at 14 pixels but 0.67
    at 2, so eighty layers of a small image would underflow. Dividing by it leaves E[x^2] constant.

    Args:
      height: image height at this layer, in pixels.
      width: image width at this layer, in pixels.

    Returns:
      An initialiser of kernels [3, 3, channels in, channels out].
    """
    kept = 1.0
    for side in (height, width):
        kept *= (1 + 2 * math.cos(math.pi / (side + 1))) / 3
    return drawn_in_float32(jax.nn.initializers.variance_scaling(2.0 / kept, "fan_in", "normal"))
