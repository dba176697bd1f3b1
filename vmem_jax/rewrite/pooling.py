"""pooling: a step whose overlapping max-pools, and their gradients, are one kernel each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.pooling import Pooling
from vmem_jax.conv.elementwise import Elementwise
from vmem_jax.conv.pooled import Pooled, pooled_p, spread_p, windows_of
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn
from vmem_jax.rewrite.carried import with_equations


def with_pooling(flat: ClosedJaxpr, chosen: Sequence[Pooling]) -> ClosedJaxpr:
    """`flat` with two equations for each of `chosen`, and without what is computed in these alone."""
    eqns = compat.open_jaxpr(flat).eqns
    return with_equations(flat, [pair for each in chosen for pair in _equations(each, eqns)])


def describe(each: Pooling, eqns: Sequence[JaxprEqn]) -> Pooled | None:
    """What the equation of the pooled value and its index computes; None for what is no image."""
    tile = each.tile
    made = Elementwise(tuple(eqns[i] for i in tile.equations), tile.rows, tile.vectors, tile.made)
    aval: Any = tile.made[0].aval
    windows = windows_of(eqns[each.index], aval.shape)
    return None if windows is None else Pooled(made, windows)


def _equations(each: Pooling, eqns: Sequence[JaxprEqn]) -> Iterator[tuple[int, JaxprEqn]]:
    described = describe(each, eqns)
    assert described is not None, "only what can be described is chosen"
    pool, index, gradient = (eqns[i] for i in (each.pooled, each.index, each.gradient))
    inputs, outs = [*each.tile.rows, *each.tile.vectors], [*pool.outvars, *index.outvars]
    yield (
        each.pooled,
        compat.new_equation(pooled_p, inputs, outs, {"pooled": described}, like=pool),
    )
    given, params = [*gradient.invars], {"spread": described.spread}
    yield (
        each.gradient,
        compat.new_equation(spread_p, given, [*gradient.outvars], params, like=gradient),
    )
