"""equal_stacks: loops that stack each value once.

A cell that casts its state for each of its gates stacks, differentiated, one equal value per gate.
XLA merges them, and so their stacks. Here the loops themselves are made so: what is planned, such as
which values a loop keeps or moves, is then planned for the stacks that exist.
"""

from __future__ import annotations

from collections.abc import Collection

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import drop_dead, inline, merge_repeated
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var


def with_equal_stacks_merged(flat: ClosedJaxpr) -> ClosedJaxpr:
    """`flat`, whose scans, and those in their bodies, stack values that are equal in every iteration
    once. A scan that reads several of them reads the one that is left once. Results of `flat` stay:
    each has memory of its own."""
    opened = compat.open_jaxpr(flat)
    results = {a for a in opened.outvars if isinstance(a, Var)}
    here: dict[Var, Var] = {}  # a stack -> an equal one
    eqns: list[JaxprEqn] = []
    changed = False
    for given in opened.eqns:
        invars = [here.get(a, a) if isinstance(a, Var) else a for a in given.invars]
        eqn = given.replace(invars=invars) if invars != [*given.invars] else given
        if eqn.primitive.name == "scan" and not eqn.effects:
            eqn = _with_inner(eqn if eqn is given else _reads_once(eqn))
            here.update(_equal(eqn, results))
        changed |= eqn is not given
        eqns.append(eqn)
    if not changed and not here:
        return flat
    parts = opened.constvars, compat.constants(flat), opened.invars, opened.outvars, eqns
    return drop_dead(compat.close(*parts, like=flat))


def _with_inner(eqn: JaxprEqn) -> JaxprEqn:
    """The scan `eqn` with the scans of its body changed alike; itself if none of them changes."""
    body = inline(eqn.params["jaxpr"])
    again = with_equal_stacks_merged(body)
    return eqn if again is body else eqn.replace(params={**eqn.params, "jaxpr": again})


def _equal(eqn: JaxprEqn, results: Collection[Var]) -> dict[Var, Var]:
    """Of the scan `eqn` each stack that equals another, and that one. None of `results` is such."""
    _, carry = compat.scan_counts(eqn)
    made = compat.open_jaxpr(merge_repeated(inline(eqn.params["jaxpr"]))).outvars
    stacks = [*zip(made[carry:], eqn.outvars[carry:], strict=True)]
    first: dict[Var, Var] = {}
    found = {}
    for value, v in sorted(stacks, key=lambda stack: stack[1] not in results):
        if isinstance(value, Var) and first.setdefault(value, v) is not v and v not in results:
            found[v] = first[value]
    return found


def _reads_once(eqn: JaxprEqn) -> JaxprEqn:
    """The scan `eqn` with one operand in place of each that it has several times."""
    closed = eqn.params["jaxpr"]
    body = compat.open_jaxpr(closed)
    start = sum(compat.scan_counts(eqn))
    first: dict[Var, Var] = {}
    same: dict[Var, Var] = {}
    for a, v in zip(eqn.invars[start:], body.invars[start:], strict=True):
        if isinstance(a, Var) and first.setdefault(a, v) is not v:
            same[v] = first[a]
    read = lambda a: same.get(a, a) if isinstance(a, Var) else a
    eqns = [inner.replace(invars=[*map(read, inner.invars)]) for inner in body.eqns]
    parts = body.constvars, compat.constants(closed), body.invars, [*map(read, body.outvars)], eqns
    again = eqn.replace(params={**eqn.params, "jaxpr": compat.close(*parts, like=closed)})
    return compat.with_results(again, [True] * len(eqn.outvars))  # without what is not read
