"""carried: a step whose 1×1 convolutions carry what stands around them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import jax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.carried import Carrying
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.tiles import Tile
from vmem_jax.conv.carried import Carried, carried_p
from vmem_jax.conv.elementwise import Elementwise
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var


def with_carried(flat: ClosedJaxpr, chosen: Sequence[Carrying]) -> ClosedJaxpr:
    """`flat` with one equation for each of `chosen`, and without what is computed in these alone."""
    eqns = compat.open_jaxpr(flat).eqns
    return with_equations(flat, [(each.product, equation(each, eqns)) for each in chosen])


def with_equations(flat: ClosedJaxpr, made: Sequence[tuple[int, JaxprEqn]]) -> ClosedJaxpr:
    """`flat` with the equations of `made`, pairs of the index of one that each replaces and it,
    instead of all that make what these make, and without what nothing reads any more."""
    opened = compat.open_jaxpr(flat)
    own = {v for _, eqn in made for v in eqn.outvars}
    # what is elementwise stays for other readers; what a new equation returns no other makes
    kept = [(i, eqn) for i, eqn in enumerate(opened.eqns) if own.isdisjoint(eqn.outvars)]
    parts = (opened.constvars, compat.constants(flat), opened.invars, opened.outvars)
    return drop_dead(compat.close(*parts, _in_order([*kept, *made]), like=flat))


def describe(each: Carrying, eqns: Sequence[JaxprEqn]) -> Carried:
    """What the equation of `each` computes."""
    tile = lambda t, given=None: Elementwise(
        tuple(eqns[i] for i in t.equations), t.rows, t.vectors, t.made, given
    )
    return Carried(
        each.matched,
        None if each.gradient is None else each.gradient[1],
        tile(each.before),
        tile(each.behind, each.raw),
        each.stores,
        len(each.results),
        tuple(
            jax.core.ShapedArray(v.aval.shape, v.aval.dtype)
            for v in (eqns[s].outvars[0] for s in each.sums)
        ),
    )


def equation(each: Carrying, eqns: Sequence[JaxprEqn]) -> JaxprEqn:
    """The equation of `each`, with the name and source line of its product."""
    product = eqns[each.product]
    inputs = [*_inputs(each.before), *_inputs(each.behind), product.invars[1]]
    outs = [*([each.before.made[0]] if each.stores else []), *each.results]
    outs += [eqns[s].outvars[0] for s in each.sums]
    outs += [] if each.gradient is None else [eqns[each.gradient[0]].outvars[0]]
    return compat.new_equation(
        carried_p, inputs, outs, {"carried": describe(each, eqns)}, like=product
    )


def _inputs(tile: Tile) -> list[Var]:
    return [*tile.rows, *tile.vectors]


def _in_order(numbered: Sequence[tuple[int, JaxprEqn]]) -> list[JaxprEqn]:
    """The equations with each behind those that it reads, and else by their numbers."""
    maker = {v: k for k, (_, eqn) in enumerate(numbered) for v in eqn.outvars}
    waits: list[int] = []
    readers: dict[int, list[int]] = {}
    for k, (_, eqn) in enumerate(numbered):
        before = {maker[a] for a in eqn.invars if isinstance(a, Var) and a in maker}
        waits.append(len(before))
        for b in before:
            readers.setdefault(b, []).append(k)
    ready = [(numbered[k][0], k) for k, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    found: list[JaxprEqn] = []
    while ready:
        _, k = heapq.heappop(ready)
        found.append(numbered[k][1])
        for r in readers.get(k, ()):
            waits[r] -= 1
            if not waits[r]:
                heapq.heappush(ready, (numbered[r][0], r))
    assert len(found) == len(numbered), "two kernels read what the other makes"
    return found
