"""reducers: the scalar functions of reductions and scatters, without barriers.

A barrier between scalars orders nothing that has memory. XLA:CPU's code generator knows none there: a
barrier that is still there after scheduling, as ours must be, ends the process
(`computation_partitioner.cc: Check failed: operand_maps.size() == 1`, JAX 0.10.2 to 0.12). Plain jit
removes all barriers before that.
"""

from __future__ import annotations

from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var

_REDUCTIONS = ("reduce", "reduce_window", "select_and_scatter")


def without_barriers_in_reducers(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed`, with the bodies of its loops and calls; itself where there is no such barrier."""
    return _without(closed, inside=False)


def _without(jaxpr: Any, inside: bool) -> Any:
    opened = compat.open_jaxpr(jaxpr)
    env: dict[Var, Atom] = {}
    read = lambda a: env.get(a, a) if isinstance(a, Var) else a
    eqns, changed = [], False
    for eqn in opened.eqns:
        if inside and eqn.primitive.name == "optimization_barrier":
            env.update(zip(eqn.outvars, map(read, eqn.invars), strict=True))
            changed = True
            continue
        new = _equation(eqn, inside)
        changed |= new is not eqn
        eqns.append(new.replace(invars=list(map(read, new.invars))) if env else new)
    if not changed:
        return jaxpr
    made = opened.replace(eqns=eqns, outvars=list(map(read, opened.outvars)))
    return made if opened is jaxpr else jaxpr.replace(jaxpr=made)


def _equation(eqn: JaxprEqn, inside: bool) -> JaxprEqn:
    name = eqn.primitive.name
    inside |= name in _REDUCTIONS or name.startswith("scatter")
    params = {key: _param(value, inside) for key, value in eqn.params.items()}
    same = all(value is eqn.params[key] for key, value in params.items())
    return eqn if same else eqn.replace(params=params)


def _param(value: Any, inside: bool) -> Any:
    if isinstance(value, tuple | list):
        items = [_param(item, inside) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else type(value)(items)
    is_jaxpr = hasattr(value, "eqns") and hasattr(value, "outvars")
    return _without(value, inside) if is_jaxpr else value
