"""paddings: what the padding of a value holds, followed from one equation to the next.

Sums over rows with zeros behind are the same sums, and maxima over rows with minus infinity behind.
Where it is something else a mask is needed. All of it is said of rows whose own elements are finite:
of others results are not finite, with the padding or without.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from vmem_jax.jax_compat import Atom, JaxprEqn, Literal


class Held(enum.Enum):
    """What padding holds: zeros, minus infinity, what all elements of its row are, numbers of any
    kind, or these and what is none."""

    ZEROS = enum.auto()
    LOWEST = enum.auto()
    REPEATED = enum.auto()
    FINITE = enum.auto()
    ANYTHING = enum.auto()

    @property
    def is_bounded(self) -> bool:
        """Whether a zero times what is held is zero."""
        return self in (Held.ZEROS, Held.REPEATED, Held.FINITE)


_MOVES = frozenset(
    """
convert_element_type copy name reduce_precision stop_gradient layout_constraint transpose reshape
squeeze expand_dims broadcast_in_dim
""".split()
)
"""What makes of any padding the same."""

_ZERO_OF_ZERO = frozenset(
    """
abs add add_any and asin asinh atan atanh copy erf expm1 imag integer_pow log1p max min mul neg or
real reduce_max reduce_min reduce_sum select_n sign sin sinh sqrt square sub tan tanh xor
""".split()
)

_FINITE_OF_FINITE = frozenset(
    """
abs add add_any and atan clamp cos eq erf ge gt integer_pow iota is_finite le logistic lt max min mul
ne neg not one_minus_square or reduce_max reduce_min reduce_sum scatter-add scatter_add select_n sign
sin square sub tanh xor
""".split()
)


def held_by(eqn: JaxprEqn, paddings: Sequence[Held | None]) -> Held:
    """What the padding of the result of `eqn` holds.

    Args:
      paddings: the same of its operands; None of those that have no padding.
    """
    name = eqn.primitive.name
    held = [_unpadded(a) if h is None else h for a, h in zip(eqn.invars, paddings, strict=True)]
    held = held[1:] if name == "select_n" else held  # who is chosen does not matter
    bounded, same = all(h.is_bounded for h in held), len({*held}) == 1
    if same and (name in _MOVES or (name == "select_n" and held[0] is not Held.REPEATED)):
        return held[0]
    if name == "mul" and Held.ZEROS in held and bounded:
        return Held.ZEROS
    if name == "integer_pow" and eqn.params["y"] < 1 and held != [Held.REPEATED]:
        return Held.ANYTHING
    if held and name in _ZERO_OF_ZERO and {*held} == {Held.ZEROS}:
        return Held.ZEROS
    if (made := _of_lowest(name, held)) is not None:
        return made
    if name == "div" and held[1] is Held.REPEATED and bounded:
        return held[0]
    if paddings and {*paddings} <= {Held.REPEATED, None}:
        return Held.REPEATED
    return Held.FINITE if bounded and name in _FINITE_OF_FINITE else Held.ANYTHING


def _of_lowest(name: str, held: Sequence[Held]) -> Held | None:
    """What is made where the first operand holds minus infinity, if that is known."""
    if not held or held[0] is not Held.LOWEST:
        return None
    if name == "exp":
        return Held.ZEROS
    keeps = name in ("add", "add_any", "sub") and held[1].is_bounded
    return Held.LOWEST if keeps or name == "reduce_max" else None


def _unpadded(a: Atom) -> Held:
    """What the padding of `a` would hold, which is the same for a whole row."""
    number = np.asarray(a.val) if isinstance(a, Literal) else None
    if number is None or number.dtype.kind not in "fiub":
        return Held.REPEATED
    return Held.ZEROS if number == 0 else Held.LOWEST if number == -np.inf else Held.REPEATED
