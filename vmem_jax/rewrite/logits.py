"""logits: the tail of a step in a loop over chunks of its tokens."""

from __future__ import annotations

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.logits import Tail
from vmem_jax.capture.sub_batches import divided
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from vmem_jax.rewrite.sub_batches import looped


def in_chunks(flat: ClosedJaxpr, tail: Tail, count: int) -> ClosedJaxpr:
    """`flat` with its `tail` in a `lax.scan` over at most `count` chunks of the tokens.

    Sums over tokens, the gradient of the head's weights among them, are kept in float32 from chunk to
    chunk. The loop stands where the tail ends, and counts as part of the backward pass where that has
    a part in it.
    """
    opened = compat.open_jaxpr(flat)
    part, parts = divided(tail.closed, tail.batch, count)
    closed = looped(part, parts, parts.smaller)
    loop = compat.open_jaxpr(closed)
    like = opened.eqns[tail.backward]
    env: dict[Var, Atom] = dict(zip(loop.invars, tail.reads, strict=True))
    read = lambda a: a if isinstance(a, Literal) else env.get(a, a)
    inside: list[JaxprEqn] = []
    for eqn in loop.eqns:
        outs = [compat.new_var(v.aval) for v in eqn.outvars]
        names = {"source_info": like.source_info, "ctx": like.ctx}
        inside.append(eqn.replace(invars=[read(a) for a in eqn.invars], outvars=outs, **names))
        env.update(zip(eqn.outvars, outs, strict=True))
    results = dict(zip(tail.returns, map(read, loop.outvars), strict=True))
    mine, last = set(tail.equations), tail.equations[-1]
    waits: set[Var] = set(tail.returns)
    before: list[JaxprEqn] = []
    behind: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    for i, eqn in enumerate(opened.eqns):
        if i in mine:
            continue
        eqn = eqn.replace(
            invars=[results.get(a, a) if isinstance(a, Var) else a for a in eqn.invars]
        )
        if i > last:
            after.append(eqn)
        elif any(isinstance(a, Var) and a in waits for a in opened.eqns[i].invars):
            waits.update(eqn.outvars)
            behind.append(eqn)
        else:
            before.append(eqn)
    outvars = [results.get(a, a) if isinstance(a, Var) else a for a in opened.outvars]
    constants = [*zip(opened.constvars, compat.constants(flat), strict=True)]
    constants += zip(loop.constvars, compat.constants(closed), strict=True)
    return drop_dead(
        compat.close(
            [v for v, _ in constants],
            [value for _, value in constants],
            opened.invars,
            outvars,
            [*before, *inside, *behind, *after],
            flat,
        )
    )
