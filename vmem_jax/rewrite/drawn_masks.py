"""drawn_masks: a step whose dropout masks are one kernel each, from the key to bits.

`jax.random.bernoulli` makes a number between 0 and 1 of the upper 23 bits of each word, and compares
it. The word itself is less than those bits of what it is compared with in the same cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.bits import pack_p
from vmem_jax.capture.def_use import readers
from vmem_jax.capture.editor import constant, spliced, with_each_replaced
from vmem_jax.capture.primitives import shape_of
from vmem_jax.capture.random_bits import can_slice, part_p
from vmem_jax.conv.drawn import DrawnMask, drawn_mask_p
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

_FRACTION = 23
"""Bits of a number between 0 and 1, all of its significand in float32."""

_UNIFORM: tuple[tuple[str, float | None, bool], ...] = (
    ("max", 0.0, True),
    ("add", 0.0, False),
    ("mul", 1.0, False),
    ("sub", 1.0, True),
    ("bitcast_convert_type", None, True),
    ("or", float(np.float32(1).view(np.uint32)), True),
    ("shift_right_logical", 32.0 - _FRACTION, True),
)
"""The operations that make such a number, the last first: (name, the other operand, whether it is
always there)."""

_EITHER = ("add", "max", "mul", "or")
"""Those whose operands may change places."""


def with_drawn_masks(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with these kernels, in the bodies of its loops, too."""
    return with_each_replaced(closed, _rule)


def _rule(closed: ClosedJaxpr) -> Callable[[JaxprEqn], Sequence[JaxprEqn]]:
    """What stands in place of each equation of `closed`. What nothing reads any more XLA drops."""
    opened = compat.open_jaxpr(closed)
    maker = {v: eqn for eqn in opened.eqns for v in eqn.outvars}
    read_by = readers(opened.eqns)
    results = {a for a in opened.outvars if isinstance(a, Var)}
    is_read_once = lambda v: len(read_by[v]) == 1 and v not in results
    return lambda eqn: _drawn(eqn, maker, is_read_once) or [eqn]


def _drawn(
    eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn], is_read_once: Callable[[Var], bool]
) -> list[JaxprEqn]:
    """What stands in place of `eqn`, if it packs a mask that words make, and nothing else reads."""
    if eqn.primitive is not pack_p:
        return []
    [out] = eqn.outvars
    axis, padded = eqn.params["axis"], shape_of(eqn.invars[0])
    below = _Chain(eqn.invars[0], maker, is_read_once)
    below.skip_zeros(axis)
    share = below.compared()
    source = None if share is None else below.words()
    threshold = math.ceil((share or 0.0) * 2**_FRACTION)
    if source is None or not 0 < threshold < 2**_FRACTION:
        return []
    part = source.primitive is part_p
    sizes: tuple[int, ...] = source.params["shape"]
    strides = tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
    step = 0
    if part:
        layout = source.params["layout"]
        if layout.outer > 1:  # its samples do not lie side by side
            return []
        step = strides[layout.dim] * layout.inner
    threshold <<= 32 - _FRACTION
    drawn = DrawnMask(shape_of(source.outvars[0]), strides, step, threshold, padded, axis)

    def of_part(words: jax.Array, offset: jax.Array) -> jax.Array:
        [made] = drawn_mask_p.bind(words, offset, drawn=drawn)
        return made

    def of_all(key: jax.Array) -> jax.Array:
        return of_part(jax.random.key_data(key), lax.full((), 0, jnp.int32))

    return spliced(of_part if part else of_all, source.invars, eqn, out)[0]


class _Chain:
    """What makes a value, one equation after another, each of which nothing else reads.

    Args:
      v: the value.
    """

    def __init__(
        self, v: Atom, maker: Mapping[Var, JaxprEqn], is_read_once: Callable[[Var], bool]
    ) -> None:
        self.v, self.maker, self.is_read_once = v, maker, is_read_once

    def next(self) -> JaxprEqn | None:
        """What makes the value; None if others read it."""
        if isinstance(self.v, Literal) or not self.is_read_once(self.v):
            return None
        return self.maker.get(self.v)

    def skip_zeros(self, axis: int) -> None:
        """Goes in front of what adds false elements behind others, along other axes than `axis`."""
        eqn = self.next()
        if eqn is None or eqn.primitive.name != "pad" or self._number(eqn.invars[1]) != 0:
            return
        config = eqn.params["padding_config"]
        if config[axis][1] == 0 and all(low == 0 <= high and not n for low, high, n in config):
            self.v = eqn.invars[0]

    def compared(self) -> float | None:
        """What the value is true for numbers below of; goes in front of the comparison."""
        eqn = self.next()
        if eqn is None or eqn.primitive.name != "lt":
            return None
        self.v = eqn.invars[0]
        return self._number(eqn.invars[1])

    def words(self) -> JaxprEqn | None:
        """What draws the words, 32 bits each, of which the value is a number between 0 and 1; None
        if it is another."""
        for name, number, is_there in _UNIFORM:
            eqn = self.next()
            if eqn is None or eqn.primitive.name != name:
                if is_there:
                    return None
                continue
            operands = [*eqn.invars]
            if name in _EITHER and self._number(operands[0]) is not None:
                operands.reverse()
            self.v, *others = operands
            if [*map(self._number, others)] != ([] if number is None else [number]):
                return None
            if name == "bitcast_convert_type" and eqn.outvars[0].aval.dtype != np.float32:
                return None
        eqn = self.next()
        draws = eqn is not None and eqn.params.get("bit_width") == 32
        if eqn is None or not draws:
            return None
        can = eqn.primitive.name == "random_bits" and can_slice(eqn)
        return eqn if can or eqn.primitive is part_p else None

    def _number(self, a: Atom) -> float | None:
        """The number that fills `a`, if it is known."""
        value = constant(a, self.maker.get)
        return None if value is None else float(value)
