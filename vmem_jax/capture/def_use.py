"""def_use: which equation of a flat jaxpr makes a value, and which ones read it."""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax.jax_compat import JaxprEqn, Var


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
