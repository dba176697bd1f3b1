"""stacks: a loop on a GPU writes each slice of its stacks where it is made, and reads it there.

JAX writes the slices at the end of an iteration. Where the iteration reads a slice itself, XLA:GPU
makes the value beside the stack and copies it there. Written where it is made, the slice is what its
kernel writes, and whatever reads it reads the stack: a barrier in between keeps XLA from passing the
value by the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.primitives import nbytes
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

LEAST_NBYTES = 2**20
"""Of a slice. Less is copied in a microsecond, which no kernel is faster than."""


def with_written_stacks(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with every loop, also those in loops, writing its slices where they are made."""
    opened = compat.open_jaxpr(closed)
    equations: list[JaxprEqn] = []
    env: dict[Var, Atom] = {}
    read = _reading(env)
    for eqn in opened.eqns:
        if eqn.primitive.name == "scan":
            inside = with_written_stacks(eqn.params["jaxpr"])
            eqn = eqn.replace(params={**eqn.params, "jaxpr": inside})
        invars = [read(a) for a in eqn.invars]
        if eqn.primitive.name == "scan" and (written := _written(eqn)):
            outs = _loop(Calls(equations.append), eqn, written, invars)
            env.update(zip(eqn.outvars, outs, strict=True))
        else:
            equations.append(eqn.replace(invars=invars))
    outvars = [read(a) for a in opened.outvars]
    parts = opened.constvars, compat.constants(closed), opened.invars, outvars, equations
    return compat.close(*parts, like=closed)


def _written(eqn: JaxprEqn) -> list[int]:
    """Which results of the body of `eqn` are slices of a stack that the body makes and reads."""
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    _, carry = compat.scan_counts(eqn)
    made = {v for each in body.eqns for v in each.outvars}
    used = {a for each in body.eqns for a in each.invars if isinstance(a, Var)}
    found: dict[Var, int] = {}
    for i, a in enumerate(body.outvars[carry:], carry):
        if isinstance(a, Var) and a in made & used and nbytes(a.aval) >= LEAST_NBYTES:
            found.setdefault(a, i)
    return [*found.values()]


def _loop(calls: Calls, eqn: JaxprEqn, written: Sequence[int], invars: Sequence[Atom]) -> list[Any]:
    """Emits `eqn` with the stacks of its results `written` carried; returns its results."""
    consts, carry = compat.scan_counts(eqn)
    end, length = consts + carry, eqn.params["length"]
    outvars = compat.open_jaxpr(eqn.params["jaxpr"]).outvars
    first = length - 1 if eqn.params["reverse"] else 0
    added = calls.bind(lambda: jnp.int32(first), [], eqn)
    for aval in (outvars[i].aval for i in written):
        added += calls.bind(lambda a=aval: jnp.zeros((length, *a.shape), a.dtype), [], eqn)
    body = _body(eqn, written, [v.aval for v in added])
    operands = [*invars[:end], *added, *invars[end:]]
    outs = calls.scan(body, consts, carry + len(added), operands, eqn)
    stacks = dict(zip(written, outs[carry + 1 : carry + len(added)], strict=True))
    rest = iter((*outs[:carry], *outs[carry + len(added) :]))
    return [stacks[i] if i in stacks else next(rest) for i in range(len(outvars))]


def _body(eqn: JaxprEqn, written: Sequence[int], added: Sequence[Any]) -> ClosedJaxpr:
    """The body of `eqn`: consts, carry, index, stacks, xs -> carry, index, stacks, ys.

    Args:
      written: which of its results are written where they are made.
      added: the avals of the index and the stacks.
    """
    closed = eqn.params["jaxpr"]
    body = compat.open_jaxpr(closed)
    consts, carry = compat.scan_counts(eqn)
    slices = {body.outvars[i]: n for n, i in enumerate(written)}
    equations: list[JaxprEqn] = []
    calls = Calls(equations.append)
    index, *stacks = given = [compat.new_var(aval) for aval in added]
    env: dict[Var, Atom] = {}
    read = _reading(env)
    for each in body.eqns:
        equations.append(each.replace(invars=[read(a) for a in each.invars]))
        for v in each.outvars:
            if v in slices:
                n = slices[v]
                stacks[n] = calls.fence(calls.bind(_put, [stacks[n], v, index], eqn), eqn)[0]
                [env[v]] = calls.bind(_get, [stacks[n], index], eqn)
    step = -1 if eqn.params["reverse"] else 1
    following = calls.bind(lambda i: i + step, [index], eqn)
    ys = [read(a) for i, a in enumerate(body.outvars) if i >= carry and i not in written]
    invars = [*body.invars[: consts + carry], *given, *body.invars[consts + carry :]]
    outvars = [*map(read, body.outvars[:carry]), *following, *stacks, *ys]
    return compat.close(
        body.constvars, compat.constants(closed), invars, outvars, equations, closed
    )


def _reading(env: dict[Var, Atom]) -> Callable[[Atom], Any]:
    return lambda a: a if isinstance(a, Literal) else env.get(a, a)


def _put(stack: Any, x: Any, i: Any) -> Any:
    starts = [i] + [jnp.int32(0)] * x.ndim  # lax.dynamic_update_index_in_dim asks whether i < 0
    return lax.dynamic_update_slice_p.bind(stack, x[None], *starts)


def _get(stack: Any, i: Any) -> Any:
    starts = [i] + [jnp.int32(0)] * (stack.ndim - 1)
    sizes = (1, *stack.shape[1:])
    return lax.dynamic_slice_p.bind(stack, *starts, slice_sizes=sizes).reshape(stack.shape[1:])
