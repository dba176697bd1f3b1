"""hosted_updates: which arguments in host memory come and go by slices, and loops for updates.

Stacks of state in host memory need not be on the device as a whole where only loops touch them
(`hosted_stacks`). Updates run in the backward loop where they can (`updates`). Those that wait for
all gradients, as behind clipping by a global norm or for the last sub-batch, get a loop of their own
behind that:

    for i in layers:
        slices i of the new moments and parameters, by slices i of the gradients and of the old ones

Such a loop begins as one that hands through the stacks of gradients that the updates read, and
`updates` then moves the updates into its body.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.all_at_once import Stacked
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.def_use import makers
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.hosted_stacks import why_whole, with_hosted_stacks
from vmem_jax.capture.primitives import Class, class_of, inner_jaxprs, is_array, shape_of
from vmem_jax.capture.shards import is_typed
from vmem_jax.capture.updates import updated_in_loops
from vmem_jax.core.program import END
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

Pairs = Sequence[tuple[int, int | None]]


def with_state_in_loops(
    flat: ClosedJaxpr,
    donated: Sequence[bool],
    hosted: Pairs,
    shardings: Sequence[Any],
    then: Callable[[ClosedJaxpr], ClosedJaxpr],
    why: Mapping[int, str] | None = None,
) -> tuple[ClosedJaxpr, tuple[Stacked, ...], dict[int, str]]:
    """`flat` with updates in loops, what gradients exist all at once, and of each hosted argument why
    it comes as a whole: "" of one that comes by slices.

    Args:
      donated, hosted, shardings: as `updated_in_loops` has them.
      then: what else is done to the loops, before arguments are in host memory.
      why: of each hosted argument a reason that is known.
    """
    update = functools.partial(
        updated_in_loops, donated=donated, hosted=hosted, shardings=shardings
    )
    settle = functools.partial(_settled, update=update, then=then, hosted=hosted)
    if why is None:
        why = {i: _excluded(flat, i, o, donated, shardings) for i, o in hosted}
    found, updated, stacked, reasons = settle(flat, why=why)
    if any(reasons[i] for i in why if not why[i]):
        looped = with_update_loops(updated, {o for i, o in hosted if not why[i] and o is not None})
        if looped is not None:
            again, _, _, fewer = settle(looped, why=why)
            if sum(map(bool, fewer.values())) < sum(map(bool, reasons.values())):
                found, reasons = again, fewer
    sliced = [i for i, reason in reasons.items() if not reason]
    return with_hosted_stacks(found, sliced), stacked, reasons


def is_stack(flat: ClosedJaxpr, argument: int) -> bool:
    """Whether an argument has an array for each iteration of a loop in `flat`."""
    shape = shape_of(compat.open_jaxpr(flat).invars[argument])
    return len(shape) > 1 and shape[0] in _lengths(flat)


def _variables(eqn: JaxprEqn) -> set[Var]:
    return {a for a in eqn.invars if isinstance(a, Var)}


def _lengths(flat: ClosedJaxpr) -> set[int]:
    """The numbers of iterations of all scans in `flat`, and of those in them together."""
    found = set[int]()
    for eqn in compat.open_jaxpr(flat).eqns:
        inner = set[int]().union(*map(_lengths, inner_jaxprs(eqn)))
        if eqn.primitive.name == "scan":
            length = eqn.params["length"]
            inner |= {length, *(length * n for n in inner)}
        found |= inner
    return found


def _excluded(
    flat: ClosedJaxpr, i: int, o: int | None, donated: Sequence[bool], shardings: Sequence[Any]
) -> str:
    """Why argument `i`, and result `o` for it, cannot come by slices whatever reads it."""
    if not is_stack(flat, i):
        return "it is no stack of what a loop reads"
    opened = compat.open_jaxpr(flat)
    argument, sharding = opened.invars[i], shardings[i] if shardings else None
    shape = shape_of(argument)
    if sharding is not None and sharding.shard_shape(shape)[0] < shape[0]:
        return "it is split over devices along the layers"
    if is_typed(argument):
        return "its type says how it is split over devices"
    if o is not None and not donated[i] and opened.outvars[o] is not opened.invars[i]:
        return "the state is not donated"
    return ""


def _settled(
    flat: ClosedJaxpr, update: Any, then: Any, hosted: Pairs, why: Mapping[int, str]
) -> tuple[ClosedJaxpr, ClosedJaxpr, tuple[Stacked, ...], dict[int, str]]:
    """`flat` updated and then changed by `then`, the same before that, what gradients exist all at
    once, and why those of `hosted` come as a whole for which `why` gives no reason yet."""
    reasons = dict(why)
    while True:
        sliced = [i for i, reason in reasons.items() if not reason]
        updated, stacked = update(flat, sliced=sliced)
        found = then(updated)
        bad = {i: reason for i, o in hosted if i in sliced if (reason := why_whole(found, i, o))}
        if not bad:
            return found, updated, stacked, reasons
        reasons |= bad


def with_update_loops(flat: ClosedJaxpr, results: Collection[int]) -> ClosedJaxpr | None:
    """`flat` with loops that hand through the stacks of gradients that `results` are made of,
    elementwise; None if there are none.

    What else reads these stacks, a norm say, reads them where they were. The loops stand behind it.
    """
    opened = compat.open_jaxpr(flat)
    eqns = opened.eqns
    maker = makers(eqns)
    lengths = {shape_of(opened.outvars[o])[0] for o in results}
    is_long = lambda v: len(shape_of(v)) > 0 and shape_of(v)[0] in lengths
    made = set[Var]()  # by loops or sub-batches, and views of that
    for eqn in eqns:
        is_view = class_of(eqn) is Class.VIEW and made & _variables(eqn)
        if is_view or (eqn.primitive.name in ("scan", END) and not eqn.effects):
            made.update(v for v in eqn.outvars if is_array(v.aval))
    stacks = {*filter(is_long, made)}
    follow = set[Var]()  # what a stack leads to through elementwise equations
    for eqn in eqns:
        given = _variables(eqn) & (stacks | follow)
        if class_of(eqn) in (Class.VIEW, Class.FUSIBLE) and given:
            follow.update(eqn.outvars)
    ends = [
        v
        for v in dict.fromkeys(a for a in opened.outvars if isinstance(a, Var))
        if v in follow and is_long(v)
    ]
    waiting, again, read = [*ends], set[int](), set[Var]()
    while waiting:
        v = waiting.pop()
        if v in stacks:
            read.add(v)
        elif v in follow and maker[v] not in again:
            again.add(maker[v])
            waiting += _variables(eqns[maker[v]])
    if not read:
        return None
    equations: list[JaxprEqn] = [*eqns]
    env = dict[Var, Atom]()
    like = eqns[min(again)]
    for length in sorted({shape_of(v)[0] for v in read}):
        handed = [v for v in maker if v in read and shape_of(v)[0] == length]
        env.update(zip(handed, _handed_through(handed, equations, like), strict=True))
    for i in sorted(again):
        eqn = eqns[i]
        outs = [compat.new_var(v.aval) for v in eqn.outvars]
        invars = [a if isinstance(a, Literal) else env.get(a, a) for a in eqn.invars]
        equations.append(eqn.replace(invars=invars, outvars=outs))
        env.update(zip(eqn.outvars, outs, strict=True))
    outvars = [env.get(a, a) if isinstance(a, Var) and a in ends else a for a in opened.outvars]
    parts = opened.constvars, compat.constants(flat), opened.invars, outvars, equations
    return drop_dead(compat.close(*parts, like=flat))


def _handed_through(stacks: Sequence[Var], equations: list[JaxprEqn], like: JaxprEqn) -> list[Any]:
    """Emits a loop that hands `stacks` through, slice by slice."""
    loop = lambda *xs: lax.scan(lambda c, x: (c, lax.optimization_barrier(x)), (), xs)[1]
    outs = Calls(equations.append).bind(loop, stacks, like)
    scan = equations[-1]  # JAX would leave it out without the barrier
    body = compat.open_jaxpr(scan.params["jaxpr"])
    through = compat.close([], [], body.invars, body.invars, [], scan.params["jaxpr"])
    equations[-1] = scan.replace(params={**scan.params, "jaxpr": through})
    return outs
