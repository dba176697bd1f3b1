"""elementwise: equations that kernels of ours compute on their tiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vmem_jax.jax_compat import JaxprEqn, Literal


class ByText:
    """Something with equations, equal to what computes the same, in every process: measured times are
    kept by its text."""

    equations: tuple[JaxprEqn, ...]

    @property
    def groups(self) -> Sequence[Sequence[Any]]:
        """The values that it reads and makes."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    @functools.cached_property
    def _text(self) -> str:
        numbers: dict[Any, int] = {}
        name = lambda a: (
            repr(a.val) if isinstance(a, Literal) else numbers.setdefault(a, len(numbers))
        )
        named = lambda atoms: [f"{name(a)}:{a.aval}" for a in atoms]
        given = [named(group) for group in self.groups]
        text = [
            f"{named(e.outvars)} = {e.primitive.name}{sorted(e.params.items())} {named(e.invars)}"
            for e in self.equations
        ]
        return f"{type(self).__name__}({given}, {text})"


def computed(eqn: JaxprEqn, operands: Sequence[jax.Array]) -> jax.Array:
    """The result of an elementwise equation on tiles of equal shapes."""
    [out] = eqn.outvars
    name = eqn.primitive.name
    if name == "add_any":
        return operands[0] + operands[1]
    if name in _WITH_NAN:
        return _WITH_NAN[name](*operands)
    if name in _IN_FLOAT32 and out.aval.dtype.name in _HALVES:
        wide = (x.astype(jnp.float32) for x in operands)
        return eqn.primitive.bind(*wide, **eqn.params).astype(out.aval.dtype)
    return eqn.primitive.bind(*operands, **eqn.params)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Elementwise(ByText):
    """Elementwise equations, on arrays (n, channels) in place of images.

    Attributes:
      equations: in order.
      rows, vectors: the values that they read, of rows × channels and of one value a channel.
      made: what they are wanted for.
      given: a value that stands before all others; None for none.
    """

    equations: tuple[JaxprEqn, ...]
    rows: tuple[Any, ...]  # JAX types variables too loosely for a checker
    vectors: tuple[Any, ...]
    made: tuple[Any, ...]
    given: Any = None

    @property
    def groups(self) -> Sequence[Sequence[Any]]:
        given = () if self.given is None else (self.given,)
        return self.rows, self.vectors, given, self.made

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """`made` of arrays (n, channels) and (1, channels), the given value in float32 first."""
        inputs = (*(() if self.given is None else (self.given,)), *self.rows, *self.vectors)
        values = dict(zip(inputs, arrays, strict=True))
        if self.given is not None:
            values[self.given] = arrays[0].astype(self.given.aval.dtype)
        shape = arrays[0].shape

        def read(a: Any) -> Any:
            if isinstance(a, Literal):
                aval: Any = a.aval
                return jnp.full(shape, a.val, aval.dtype)
            return jnp.broadcast_to(values[a], shape)

        for eqn in self.equations:
            operands = [read(a) for a in eqn.invars]
            spreads = eqn.primitive.name == "broadcast_in_dim"
            values[eqn.outvars[0]] = operands[0] if spreads else computed(eqn, operands)
        return [read(v) for v in self.made]


_HALVES = ("bfloat16", "float16")

_IN_FLOAT32 = frozenset(
    """
cos div exp exp2 expm1 integer_pow log log1p logistic one_minus_square pow rsqrt sin sqrt tanh
""".split()
)
"""What is computed in float32 and rounded to a half, as XLA does: Pallas for Triton has no division
of these (JAX 0.10.2 to 0.12)."""


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where((a <= b) | (b != b), b, a)


def _smaller(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where((a >= b) | (b != b), b, a)


_WITH_NAN: dict[str, Callable[..., jax.Array]] = {
    "max": _larger,
    "min": _smaller,
    "clamp": lambda low, x, high: _smaller(_larger(x, low), high),
}
"""What a NaN goes through: Pallas for Triton returns the other operand for one, so that a ReLU would
hide it (JAX 0.10.2 to 0.12)."""
