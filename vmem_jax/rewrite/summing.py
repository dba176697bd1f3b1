"""summing: a step with one pass for several sums over rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.summing import Summing
from vmem_jax.conv.elementwise import Elementwise
from vmem_jax.conv.summed import Summed, summed_p
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn
from vmem_jax.rewrite.carried import with_equations


def with_summing(flat: ClosedJaxpr, chosen: Sequence[Summing]) -> ClosedJaxpr:
    """`flat` with one equation for each of `chosen`, and without what is computed in these alone."""
    eqns = compat.open_jaxpr(flat).eqns
    made = [(each.sums[0], _equation(each, eqns)) for each in chosen]
    return with_equations(flat, made)


def describe(each: Summing, eqns: Sequence[JaxprEqn]) -> Summed:
    """What the equation of `each` computes."""
    tile = each.tile
    made = Elementwise(tuple(eqns[i] for i in tile.equations), tile.rows, tile.vectors, tile.made)
    totals = (eqns[i].outvars[0].aval for i in each.sums)
    sums = tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in totals)
    return Summed(made, len(each.stored), sums)


def _equation(each: Summing, eqns: Sequence[JaxprEqn]) -> JaxprEqn:
    """The equation of `each`, with the name and source line of its first sum."""
    first = eqns[each.sums[0]]
    outs = [*each.stored, *(eqns[i].outvars[0] for i in each.sums)]
    inputs = [*each.tile.rows, *each.tile.vectors]
    return compat.new_equation(summed_p, inputs, outs, {"summed": describe(each, eqns)}, like=first)
