"""own_stacks: stacks of several loops that XLA:GPU would begin as one array of zeros.

A loop's stack begins as zeros, which XLA (0.11.2) leaves out where no other loop reads the very array
(`xla_gpu_enable_dus_accumulator_zero_init_elimination`). Of two loops that stack slices of one shape
it is the same array: all of their stacks are filled in front of the first loop, and those of the last
one are there throughout, 4 to 7 % of the need of two recurrent layers of 512 units, and 14 % where
other stacks of theirs go through host memory. So the stacks of each such loop have another shape
here: a dimension of size one for each loop before it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.primitives import is_array
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var


def with_own_stacks(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with stacks whose shapes no two loops share, in the bodies of its loops, too."""
    opened = compat.open_jaxpr(closed)
    equations: list[JaxprEqn] = []
    calls = Calls(equations.append)
    here: dict[Var, Atom] = {}
    read = lambda a: here.get(a, a) if isinstance(a, Var) else a
    before: Counter[Any] = Counter()  # shape and type of a stack -> loops with one
    for eqn in opened.eqns:
        invars = [*map(read, eqn.invars)]
        again = None
        if eqn.primitive.name == "scan":
            again = _again(eqn, before)
        if again is None:
            equations.append(eqn.replace(invars=invars))
            continue
        body, more = again
        consts, carry = compat.scan_counts(eqn)
        outs = calls.scan(body, consts, carry, invars, eqn)
        for v, out, count in zip(eqn.outvars, outs, more, strict=True):
            if count:
                squeezed = lambda x, count=count: lax.squeeze(x, range(1, 1 + count))
                [out] = calls.bind(squeezed, [out], eqn)
            here[v] = out
    if not here:
        return closed
    outvars = [*map(read, opened.outvars)]
    parts = opened.constvars, compat.constants(closed), opened.invars, outvars, equations
    return compat.close(*parts, like=closed)


def _again(eqn: JaxprEqn, before: Counter[Any]) -> tuple[ClosedJaxpr, list[int]] | None:
    """The body of the scan `eqn`, and for each result the dimensions that it has more; None if they
    stay. Adds its stacks to those of the loops `before`."""
    given = eqn.params["jaxpr"]
    _, carry = compat.scan_counts(eqn)
    stacks: list[Any] = [v.aval for v in eqn.outvars[carry:]]
    keys = [
        (a.shape, a.dtype) if is_array(a) and not compat.is_in_host_memory(a) else None
        for a in stacks
    ]
    more = [0] * carry + [before[key] if key else 0 for key in keys]
    before.update({key for key in keys if key})
    inner = with_own_stacks(given)
    if inner is given and not any(more):
        return None
    opened = compat.open_jaxpr(inner)
    equations = [*opened.eqns]
    calls = Calls(equations.append)
    outs = [
        calls.bind(lambda y, n=n: lax.expand_dims(y, range(n)), [a], eqn)[0] if n else a
        for a, n in zip(opened.outvars, more, strict=True)
    ]
    parts = opened.constvars, compat.constants(inner), opened.invars, outs, equations
    return compat.close(*parts, like=inner), more
