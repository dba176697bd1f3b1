"""flatten: a jaxpr without calls, without dead and without repeated equations.

`jit`, `custom_jvp`, `custom_vjp`, `checkpoint` and scans of one iteration are inlined, so that the
plan sees every equation. A `jax.checkpoint` is inlined and its repetitions are merged, so it becomes
a hint: the plan keeps or recomputes these values by the budget.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.reducers import without_barriers_in_reducers
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

# The parameter that holds the callee, by primitive.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
}


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns `closed` with calls inlined, then dead equations dropped and repeated ones merged."""
    return merge_repeated(drop_dead(inline(without_barriers_in_reducers(closed))))


def callee(eqn: JaxprEqn) -> Any | None:
    """The jaxpr that `eqn` calls, if it may be inlined: a call that only groups equations."""
    param = _CALLS.get(eqn.primitive.name)
    if param is None or param not in eqn.params:
        return None
    if param == "jaxpr" and eqn.primitive.name in ("jit", "pjit"):
        # shardings and compiler options on an inner jit mean something: it stays one opaque step
        shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        if not all(map(compat.is_unspecified_sharding, shardings)):
            return None
        if eqn.params.get("compiler_options_kvs"):
            return None
    return eqn.params[param]


def inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns `closed` with every call replaced by the equations of its callee, at any depth."""
    opened = compat.open_jaxpr(closed)
    equations: list[JaxprEqn] = []
    constvars: list[Var] = []
    consts: list[Any] = []

    def bind_constants(jaxpr: Any, env: dict[Var, Atom]) -> None:
        for var, value in zip(
            compat.open_jaxpr(jaxpr).constvars, compat.constants(jaxpr), strict=True
        ):
            env[var] = compat.new_var(var.aval)
            constvars.append(env[var])
            consts.append(value)

    def run(jaxpr: Any, args: Sequence[Atom], caller: JaxprEqn | None) -> list[Atom]:
        opened = compat.open_jaxpr(jaxpr)
        env: dict[Var, Atom] = {}
        bind_constants(jaxpr, env)
        env.update(zip(opened.invars, args, strict=True))

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in opened.eqns:
            if caller is not None:
                eqn = compat.nest_name_stack(eqn, caller)
            invars = [read(a) for a in eqn.invars]
            inner = callee(eqn)
            if inner is not None:
                outs = run(inner, invars, eqn)
            elif eqn.primitive.name == "scan" and eqn.params["length"] == 1 and not eqn.effects:
                outs = run_once(eqn, invars)
            else:
                outs = [compat.new_var(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(invars=invars, outvars=outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in opened.outvars]

    def run_once(eqn: JaxprEqn, invars: Sequence[Atom]) -> list[Atom]:
        """The body of a scan of one iteration, which XLA runs without a loop, too."""
        consts, carry = compat.scan_counts(eqn)
        calls = Calls(equations.append)
        first = [
            calls.bind(lambda x: lax.squeeze(x, [0]), [x], eqn)[0] for x in invars[consts + carry :]
        ]
        outs = run(eqn.params["jaxpr"], [*invars[: consts + carry], *first], eqn)
        stacked = [calls.bind(lambda y: lax.expand_dims(y, [0]), [y], eqn)[0] for y in outs[carry:]]
        return [*outs[:carry], *stacked]

    outvars = run(closed, opened.invars, None)
    return compat.close(constvars, consts, opened.invars, outvars, equations, closed)


def drop_dead(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns `closed` without the equations that have no effect and no reader, and without the
    results of scans that have no reader: gradients, say, of weights that an optimiser leaves as they
    are. What a backward scan makes them of is a residual of the forward scan."""
    opened = compat.open_jaxpr(closed)
    needed = {a for a in opened.outvars if isinstance(a, Var)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(opened.eqns):
        read = [v in needed for v in eqn.outvars]
        if eqn.effects or any(read):
            if eqn.primitive.name == "scan" and not eqn.effects and not all(read):
                eqn = compat.with_results(eqn, read)
            needed.update(a for a in eqn.invars if isinstance(a, Var))
            kept.append(eqn)
    used = [
        (v, c)
        for v, c in zip(opened.constvars, compat.constants(closed), strict=True)
        if v in needed
    ]
    return compat.close(
        [v for v, _ in used],
        [c for _, c in used],
        opened.invars,
        opened.outvars,
        kept[::-1],
        closed,
    )


def merge_repeated(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns `closed` with equal pure equations of equal inputs computed once (value numbering)."""
    opened = compat.open_jaxpr(closed)
    env: dict[Var, Atom] = {}
    seen: dict[Hashable, Sequence[Var]] = {}
    kept: list[JaxprEqn] = []

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else env.get(atom, atom)

    for eqn in opened.eqns:
        invars = [read(a) for a in eqn.invars]
        key = None if eqn.effects else _value_number(eqn, invars)
        if key is not None and key in seen:
            env.update(zip(eqn.outvars, seen[key], strict=True))
            continue
        if key is not None:
            seen[key] = eqn.outvars
        kept.append(eqn.replace(invars=invars))
    outvars = [read(a) for a in opened.outvars]
    return compat.close(
        opened.constvars, compat.constants(closed), opened.invars, outvars, kept, closed
    )


def _literal(literal: Literal) -> Hashable:
    """Equal for literals of the same bits. Those of NumPy are slow to print."""
    value = literal.val
    bits = value.tobytes() if isinstance(value, np.ndarray | np.generic) else repr(value)
    return "literal", str(literal.aval), bits


def _value_number(eqn: JaxprEqn, invars: Sequence[Atom]) -> Hashable | None:
    """Equal for equations that compute the same values; None where that cannot be decided."""
    inputs = tuple(_literal(a) if isinstance(a, Literal) else id(a) for a in invars)
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    key = (eqn.primitive, params, inputs, id(eqn.ctx), tuple(str(v.aval) for v in eqn.outvars))
    try:
        hash(key)
    except TypeError:
        return None
    return key
