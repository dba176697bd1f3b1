"""What a layer is, and what makers of layers draw their choices from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = Mapping[str, jax.Array]
Apply = Callable[[Params, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer for one shape of activations.

    Attributes:
      params: float32 arrays by name; the program casts them.
      apply: (parameters, activations, random key) -> activations. It takes and returns arrays of
        shape (batch, time, channels) and of one dtype; the shape that it returns may differ.
    """

    params: Mapping[str, np.ndarray]
    apply: Apply


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes that layers name, so that a program can be made again in double precision."""

    half: Any = jnp.bfloat16
    single: Any = jnp.float32
    complex: Any = jnp.complex64


DOUBLE = Dtypes(jnp.float64, jnp.float64, jnp.complex128)


class Draw:
    """Random choices, determined by a seed of several integers."""

    def __init__(self, *seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return np.float32(scale) * self._rng.standard_normal(shape, np.float32)

    def kernel(self, *shape: int) -> np.ndarray:
        """Weights of variance 1 / fan-in, where the last dimension is that of the outputs."""
        return self.normal(*shape, scale=max(math.prod(shape[:-1]), 1) ** -0.5)

    def integers(self, high: int, shape: tuple[int, ...]) -> np.ndarray:
        return self._rng.integers(0, max(high, 1), shape).astype(np.int32)

    def permutation(self, count: int) -> np.ndarray:
        return self._rng.permutation(count).astype(np.int32)

    def one(self, options: Sequence[Any]) -> Any:
        return options[int(self._rng.integers(len(options)))]

    def some(self, options: Sequence[Any]) -> tuple[Any, ...]:
        """A part of `options`, at least one of them, in their order."""
        kept = [o for o in options if self._rng.random() < 0.5]
        return tuple(kept) or (self.one(options),)

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def between(self, low: float, high: float) -> float:
        """Log-uniformly from `low` to `high`."""
        return float(low * (high / low) ** self._rng.random())


Maker = Callable[[Draw, tuple[int, int, int], Dtypes], Layer | None]
"""(choices, shape of the activations, dtypes) -> a layer, or None where it has no such shape."""


def stateless(apply: Callable[[jax.Array], jax.Array]) -> Layer:
    """A layer without parameters and random bits."""
    return Layer({}, lambda p, x, key: apply(x))


def image_of(time: int) -> tuple[int, int]:
    """Height and width of an image of `time` pixels, as square as there is."""
    height = max((h for h in range(1, math.isqrt(max(time, 0)) + 1) if time % h == 0), default=0)
    return height, time // height if height else 0


def divisor(draw: Draw, number: int) -> int:
    return draw.one([d for d in (1, 2, 4, 8) if number % d == 0])
