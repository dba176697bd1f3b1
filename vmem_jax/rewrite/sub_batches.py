"""sub_batches: puts the equations between the two boundaries into a `lax.scan` over sub-batches.

A smaller sub-batch stands in front of the loop, with its equations in the same order. Behind the loop
it would need the totals twice: XLA writes the result of an addition over its operand, but not where
that is one of a loop's results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.sub_batches import SubBatches, begin_p, end_p, twins
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var


class _Part:
    """The equations between the boundaries of `closed`: one sub-batch.

    Attributes:
      begin, end: the indices of the boundaries.
      free: variables from before that it reads directly, not through the first boundary.
      run: (first sample, operands of the first boundary, totals so far, free) -> totals.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        opened = compat.open_jaxpr(closed)
        self.eqns: Sequence[JaxprEqn] = opened.eqns
        names = [eqn.primitive for eqn in self.eqns]
        self.begin, self.end = names.index(begin_p), names.index(end_p)
        inside = self.eqns[self.begin + 1 : self.end]
        first, last = self.eqns[self.begin], self.eqns[self.end]
        made = {*first.outvars, *(v for eqn in inside for v in eqn.outvars)}
        given = last.invars[: len(last.outvars)]
        read = [a for eqn in inside for a in eqn.invars] + given
        self.free = [*dict.fromkeys(a for a in read if isinstance(a, Var) and a not in made)]
        self.run = jaxpr_as_fun(
            compat.close([], [], [*first.outvars, *self.free], given, inside, closed)
        )


def looped(
    closed: ClosedJaxpr, sub_batches: SubBatches, smaller: ClosedJaxpr | None
) -> ClosedJaxpr:
    """`closed` with its one sub-batch replaced by a loop over all sub-batches.

    Args:
      smaller: the same step for the smaller sub-batch, if there is one.
    """
    opened = compat.open_jaxpr(closed)
    part = _Part(closed)
    begin, end = part.eqns[part.begin], part.eqns[part.end]
    started = begin.params["started"]
    through = len(begin.invars) - started
    front, indices = None, list[int]()
    if smaller is not None:
        front = _Part(smaller)
        twin = twins(smaller, closed, part.begin)  # they share these equations
        indices = [part.free.index(twin[v]) for v in front.free]
    avals = [v.aval for v in begin.outvars[1 + through :]]
    whole = sub_batches.count - (front is not None)

    def loop(*values: Any) -> Any:
        entered, start = values[:through], values[through : through + started]
        outside = values[through + started :]

        def once(totals: Any, offset: Any) -> Any:
            return tuple(part.run(offset, *entered, *totals, *outside)), None

        totals = (*start, *(jnp.zeros(a.shape, a.dtype) for a in avals[started:]))
        if front is not None:
            totals = tuple(
                front.run(jnp.int32(0), *entered, *totals, *(outside[p] for p in indices))
            )
        offsets = jnp.arange(whole, dtype=jnp.int32) * sub_batches.size + sub_batches.smaller_size
        totals, _ = lax.scan(once, totals, offsets, unroll=sub_batches.unroll)
        return list(totals)

    equations = [*part.eqns[: part.begin]]
    outs = Calls(equations.append).bind(loop, [*begin.invars, *part.free], begin)
    env = dict(zip(end.outvars, outs, strict=True))
    read = lambda a: a if isinstance(a, Literal) else env.get(a, a)
    for eqn in part.eqns[part.end + 1 :]:
        equations.append(eqn.replace(invars=[read(a) for a in eqn.invars]))
    return drop_dead(
        compat.close(
            opened.constvars,
            compat.constants(closed),
            opened.invars,
            [read(a) for a in opened.outvars],
            equations,
            closed,
        )
    )
