"""normalising: a step whose convolutions normalise their operands, and add up their results."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.normalising import Normalising, Prologue
from vmem_jax.conv.elementwise import Elementwise
from vmem_jax.conv.prologue import normalising_convolution
from vmem_jax.core.convolution import Configuration
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var


def with_normalising(flat: ClosedJaxpr, chosen: Mapping[Normalising, Configuration]) -> ClosedJaxpr:
    """`flat` with calls for the `chosen` convolutions, each by its configuration, and without what
    these make unnecessary."""
    opened = compat.open_jaxpr(flat)
    eqns: Sequence[JaxprEqn] = opened.eqns
    by_equation = {each.equation: each for each in chosen}
    assert len(by_equation) == len(chosen), "a convolution is chosen once"
    summed = {i: (each.equation, which) for each in chosen for i, which in each.sums}
    made: list[JaxprEqn] = []
    calls = Calls(made.append)
    instead: dict[Any, Any] = {}
    read = lambda a: a if isinstance(a, Literal) else instead.get(a, a)
    vectors: dict[Var, list[Any]] = {}  # scale and bias of an operand
    sums: dict[int, list[Any]] = {}
    for i, eqn in enumerate(eqns):
        if i in summed:
            equation, which = summed[i]
            instead[eqn.outvars[0]] = sums[equation][which]
            continue
        if i not in by_equation:
            made.append(eqn.replace(invars=[*map(read, eqn.invars)]))
            continue
        each = by_equation[i]
        operands: list[Atom] = [*map(read, eqn.invars)]
        p = each.prologue
        if p is not None:
            if p.operand not in vectors:
                function = functools.partial(_scale_and_bias, p, eqns)
                vectors[p.operand] = calls.bind(function, [*map(read, p.vectors)], eqn)
            operands[0] = read(p.raw)
            operands += vectors[p.operand]
        call = functools.partial(_call, each, chosen[each])
        result, *sums[i] = calls.bind(call, operands, eqn)
        instead[eqn.outvars[0]] = result
    parts = (opened.constvars, compat.constants(flat), opened.invars, [*map(read, opened.outvars)])
    return drop_dead(compat.close(*parts, made, like=flat))


def _scale_and_bias(p: Prologue, eqns: Sequence[JaxprEqn], *vectors: jax.Array) -> list[jax.Array]:
    """Of what is affine in `p.raw` the derivative, and the value at zero; (C,) in its type."""
    aval: Any = p.raw.aval
    channels = aval.shape[-1]
    shifted = Elementwise(tuple(eqns[i] for i in p.equations), (p.raw,), p.vectors, (p.shifted,))
    rows = [v.reshape(1, channels) for v in vectors]
    zero = jnp.zeros((1, channels), aval.dtype)
    bias, scale = jax.jvp(lambda x: shifted(x, *rows)[0], (zero,), (jnp.ones_like(zero),))
    return [v.reshape(channels).astype(aval.dtype) for v in (scale, bias)]


def _call(
    each: Normalising,
    configuration: Configuration,
    lhs: jax.Array,
    rhs: jax.Array,
    *vectors: jax.Array,
) -> list[jax.Array]:
    """Emits it, from its equation's operands, scale and bias to its result and sums."""
    matched = each.matched
    result, *sums = normalising_convolution(
        matched.convolution, configuration, *matched.operands(lhs, rhs), *vectors
    )
    return [matched.result(result), *sums]
