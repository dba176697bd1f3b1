"""A step that rounds otherwise, at random, in every operation: how far rounding alone takes results.

Monte Carlo arithmetic (Parker, 1997): each result that is rounded is changed by about a unit of
roundoff, each long sum by what the probabilistic bound of Higham and Mary (2019) allows, the square
root of the number of its terms as many units, of the terms and of the sum. What then differs from run
to run may differ between two programs that are fused, ordered and divided otherwise: a value near a
step (a cast to integers, a comparison, a narrow dtype) falls on either side, and a difference of
values that are nearly equal is noise.

A cast to a narrower dtype and back is left out at random, for each operation that reads the result:
XLA:CPU's sums by YNNPACK do so where they hold the casts (JAX 0.12), and what else reads the value
has it rounded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from vmem_jax import jax_compat as compat

RUNS = 16

_CALLS = ("jaxpr", "call_jaxpr")
"""Parameters that hold what an equation calls, of equations that only group others."""

_INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "checkpoint",
    "remat2",
)

_ROUNDED = {
    *(
        "add",
        "add_any",
        "sub",
        "mul",
        "div",
        "rem",
        "square",
        "pow",
        "integer_pow",
        "sqrt",
        "rsqrt",
    ),
    *(
        "cbrt",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
    ),
    *("atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv"),
    *("lgamma", "digamma", "abs", "convert_element_type", "reduce_precision"),
}
"""Elementwise operations whose results are rounded. What only moves, compares or selects is exact."""


def rounded_at_random(step: Callable[..., Any]) -> Callable[..., Any]:
    """(amount, seed, *args) -> results of `step` with every rounding changed at random.

    Each operation is done alone, once, whatever XLA could merge, repeat or fuse.

    Args:
      step: of arrays, to any tree.

    Returns:
      A function that can be jitted. Its first argument is the noise in units of roundoff: with 0 the
      results are those of the program as it is written.
    """

    def run(amount: Any, seed: Any, *args: Any) -> Any:
        closed, shape = jax.make_jaxpr(step, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        noise = _Noise(amount, seed)
        outs, _ = _run(closed, leaves, [_is_inexact(x) for x in leaves], noise)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return run


class _Noise:
    """Random relative changes, by a hash of the value that is changed and of the place.

    Equal values at one place are changed alike, as rounding does it.
    """

    def __init__(self, amount: Any, seed: Any) -> None:
        self._amount, self._seed, self._places = amount, seed, itertools.count(1)
        self._choices = itertools.count(1)

    def __call__(self, x: Any, units: float, finest: bool = False) -> Any:
        """`x`, each element of it changed by up to `units` units of roundoff.

        Args:
          finest: units of single precision, also where `x` is narrower.
        """
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(self(x.real, units), self(x.imag, units))
        wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        bits = bits ^ (self._seed + jnp.uint32(next(self._places) * 0x9E3779B1 % 2**32))
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        uniform = (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1
        roundoff = float(jnp.finfo(jnp.float32 if finest else x.dtype).eps) / 2
        changed = wide * (1 + self._amount * units * roundoff * uniform).astype(wide.dtype)
        return jnp.where(jnp.isfinite(wide), changed, wide).astype(x.dtype)

    def either(self, written: Any, other: Any) -> Any:
        """`written`, or in half of the places `other`; without noise always `written`."""
        bits = self._seed ^ jnp.uint32(next(self._choices) * 0x9E3779B1 % 2**32)
        takes_other = (bits * jnp.uint32(0x7FEB352D) >> 31 == 1) & (self._amount > 0)
        return jnp.where(takes_other, other, written)


def _run(
    closed: Any, args: Sequence[Any], known: Sequence[bool], noise: _Noise
) -> tuple[list[Any], list[bool]]:
    """The results of a jaxpr, and which of them depend on numbers that are rounded.

    Args:
      known: the same of its arguments. What is computed from constants and integers alone, as
        positions are, is the same in every program.
    """
    jaxpr = compat.open_jaxpr(closed)
    values = dict(zip(jaxpr.constvars, compat.constants(closed), strict=True))
    values |= zip(jaxpr.invars, args, strict=True)
    rounds = dict.fromkeys(jaxpr.constvars, False) | dict(zip(jaxpr.invars, known, strict=True))
    read = lambda a: a.val if isinstance(a, Literal) else values[a]
    narrowed: dict[Any, Any] = {}  # what was cast to a narrower dtype, as it was before
    unrounded: dict[Any, Any] = {}  # what was cast back, as it was before both casts
    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        for i, a in enumerate(eqn.invars):
            if not isinstance(a, Literal) and a in unrounded:
                operands[i] = noise.either(operands[i], unrounded[a])
        which = [not isinstance(a, Literal) and rounds[a] for a in eqn.invars]
        outs, found = _equation(eqn, operands, which, noise)
        if eqn.primitive.name == "convert_element_type" and found == [True]:
            [a], [b] = eqn.invars, eqn.outvars
            if _loses(eqn):
                narrowed[b] = operands[0]
            elif a in narrowed and narrowed[a].dtype == outs[0].dtype:
                unrounded[b] = narrowed[a]
        values |= zip(eqn.outvars, outs, strict=True)
        rounds |= zip(eqn.outvars, found, strict=True)
    outs = [read(a) for a in jaxpr.outvars]
    return outs, [not isinstance(a, Literal) and rounds[a] for a in jaxpr.outvars]


def _equation(
    eqn: Any, operands: list[Any], which: list[bool], noise: _Noise
) -> tuple[Sequence[Any], list[bool]]:
    name = eqn.primitive.name
    if name in _INLINED:
        [inner] = [eqn.params[n] for n in _CALLS if n in eqn.params]
        return _run(inner, operands, which, noise)
    if name in _LOOPS:
        outs = _LOOPS[name](eqn, operands, which, noise)
        return outs, [_is_inexact(x) for x in outs]
    terms = _TERMS[name](eqn) if name in _TERMS else 0
    if terms and any(which):
        units = math.sqrt(max(terms, 1))
        operands = [
            noise(x, units) if known and _is_single(x) else x
            for x, known in zip(operands, which, strict=True)
        ]
    outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    outs = list(outs) if eqn.primitive.multiple_results else [outs]
    found = [any(which) and _is_inexact(x) for x in outs]
    for i, x in enumerate(outs):
        if not found[i]:
            continue
        if terms:
            outs[i] = noise(noise(x, math.sqrt(max(terms, 1)), finest=True), 2)
        elif name in _ROUNDED and _loses(eqn):
            outs[i] = noise(x, 2)
    return lax.optimization_barrier(outs), found


def _loses(eqn: Any) -> bool:
    """Whether the elementwise `eqn` rounds: a cast to a wider dtype and |x| of a real x do not."""
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if eqn.primitive.name == "convert_element_type":
        return _is_inexact(eqn.invars[0].aval) and jnp.finfo(before).eps < jnp.finfo(after).eps
    return eqn.primitive.name != "abs" or before != after


# -- loops


def _scan(eqn: Any, operands: list[Any], which: list[bool], noise: _Noise) -> list[Any]:
    count, carried = compat.scan_counts(eqn)
    consts, xs = operands[:count], operands[count + carried :]
    known = [*which[:count], *map(_is_inexact, operands[count : count + carried])]
    known += which[count + carried :]

    def body(carry: Any, x: Any) -> Any:
        outs, _ = _run(eqn.params["jaxpr"], [*consts, *carry, *x], known, noise)
        return outs[:carried], outs[carried:]

    carry, ys = lax.scan(
        body,
        operands[count : count + carried],
        xs,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    return [*carry, *ys]


def _while(eqn: Any, operands: list[Any], which: list[bool], noise: _Noise) -> list[Any]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    asks, does = operands[:first], operands[first : first + second]
    begin = operands[first + second :]
    carried = [_is_inexact(x) for x in begin]

    def again(carry: Any) -> Any:
        known = [*which[:first], *carried]
        return _run(eqn.params["cond_jaxpr"], [*asks, *carry], known, noise)[0][0]

    def body(carry: Any) -> Any:
        known = [*which[first : first + second], *carried]
        return _run(eqn.params["body_jaxpr"], [*does, *carry], known, noise)[0]

    return lax.while_loop(again, body, begin)


def _cond(eqn: Any, operands: list[Any], which: list[bool], noise: _Noise) -> list[Any]:
    index, *rest = operands
    run = lambda branch: lambda *args: _run(branch, args, which[1:], noise)[0]
    return lax.switch(index.astype(jnp.int32), [run(b) for b in eqn.params["branches"]], *rest)


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


# -- sums


def _contracted(eqn: Any) -> int:
    (dims, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[d] for d in dims)


def _in_kernel(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    return math.prod(kernel) // max(kernel[eqn.params["dimension_numbers"].rhs_spec[0]], 1)


def _reduced(eqn: Any) -> int:
    return eqn.invars[0].aval.size // max(eqn.outvars[0].aval.size, 1)


def _in_window(eqn: Any) -> int:
    return math.prod(eqn.params["window_dimensions"])


def _along(eqn: Any) -> int:
    return eqn.invars[0].aval.shape[eqn.params["axis"]]


def _updates(eqn: Any) -> int:
    return 1 + math.prod(eqn.invars[1].aval.shape[:-1])


def _transformed(eqn: Any) -> int:
    return 1 + math.ceil(math.log2(max(math.prod(eqn.params["fft_lengths"]), 1)))


def _solved(eqn: Any) -> int:
    return max((a.aval.shape[-1] for a in eqn.invars if a.aval.shape), default=1)


_TERMS: dict[str, Callable[[Any], int]] = {
    "dot_general": _contracted,
    "conv_general_dilated": _in_kernel,
    **dict.fromkeys(("reduce_sum", "reduce_prod"), _reduced),
    **dict.fromkeys(("reduce_window_sum", "select_and_scatter_add"), _in_window),
    **dict.fromkeys(("cumsum", "cumprod", "cumlogsumexp"), _along),
    **dict.fromkeys(("scatter-add", "scatter_add"), _updates),
    "fft": _transformed,
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "custom_linear_solve"), _solved),
}
"""Operations that add, and about how many terms of each result."""


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_single(x: Any) -> bool:
    """Whether noise of single precision can be seen in `x`."""
    return _is_inexact(x) and jnp.finfo(x.dtype).eps <= np.finfo(np.float32).eps


def runs(step: Callable[..., Any], fresh: Callable[[], Any], count: int = RUNS) -> Iterator[Any]:
    """The results with each operation alone, then those of `count` runs that round at random.

    Args:
      fresh: makes the arguments.
    """
    jitted = jax.jit(rounded_at_random(step))
    for seed in range(count + 1):
        yield jitted(float(seed > 0), jnp.uint32(seed * 0x85EBCA6B % 2**32), *fresh())
