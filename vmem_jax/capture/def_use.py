"""def_use: which equation of a flat jaxpr makes a value, which ones read it, and what it was in front
of barriers."""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax.jax_compat import Atom, JaxprEqn, Literal, Var


def makers(eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
    """Of each value that `eqns` make the index of the equation."""
    return {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}


def readers(eqns: Sequence[JaxprEqn]) -> dict[Var, list[int]]:
    """Of each value that `eqns` read the indices of the equations, in order, each once."""
    found: dict[Var, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for a in eqn.invars:
            if isinstance(a, Var):
                at = found.setdefault(a, [])
                if not at or at[-1] != i:
                    at.append(i)
    return found


def before_barriers(eqns: Sequence[JaxprEqn]) -> dict[Var, Atom]:
    """Of each value that went through barriers what it was in front of all of them."""
    found: dict[Var, Atom] = {}
    for eqn in eqns:
        if eqn.primitive.name == "optimization_barrier":
            given = (a if isinstance(a, Literal) else found.get(a, a) for a in eqn.invars)
            found |= zip(eqn.outvars, given, strict=True)
    return found
