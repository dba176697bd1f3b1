"""Calls of traced functions, loops and barriers, as equations of a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var


class Calls:
    """Emits calls. Each takes the equation `like` in front of which it stands.

    Args:
      emit: takes an equation.
    """

    def __init__(self, emit: Callable[[JaxprEqn], None]) -> None:
        self.emit = emit
        self._traced: dict[Hashable, Any] = {}

    def fence(self, values: Sequence[Var], like: JaxprEqn) -> list[Var]:
        """One barrier over `values`; returns what stands for them from there on."""
        outs = [compat.new_var(v.aval) for v in values]
        self.emit(compat.new_equation(lax.optimization_barrier_p, values, outs, {}, like))
        return outs

    def bind(
        self, call: Callable, operands: Sequence[Atom], like: JaxprEqn, key: Hashable = None
    ) -> list[Any]:
        """Emits the equations of `call` on `operands`; returns the variables of its results.

        Args:
          key: what is traced once for operands of the same types: all that `call` depends on.
        """
        avals = [_traceable(v.aval) for v in operands]
        there = [compat.is_in_host_memory(v.aval) for v in operands]
        lying = lambda x, is_there: jax.device_put(x, jax.memory.Space.Host) if is_there else x
        where = lambda *xs: call(*map(lying, xs, there))
        known = None if key is None else (key, *avals, *there)
        if (opened := self._traced.get(known)) is None:
            opened = compat.open_jaxpr(jax.make_jaxpr(where if any(there) else call)(*avals))
            if known is not None:
                self._traced[known] = opened
        here: dict[Var, Atom] = dict(zip(opened.invars, operands, strict=True))
        read = lambda a: here[a] if isinstance(a, Var) else a
        for n, eqn in enumerate(opened.eqns):
            if n < sum(there):  # what is traced begins on the device, these do not
                here[eqn.outvars[0]] = read(eqn.invars[0])
                continue
            outs = [compat.new_var(v.aval) for v in eqn.outvars]
            here.update(zip(eqn.outvars, outs, strict=True))
            self.emit(
                eqn.replace(
                    invars=[read(a) for a in eqn.invars], outvars=outs, source_info=like.source_info
                )
            )
        return [read(a) for a in opened.outvars]

    def scan(
        self, body: ClosedJaxpr, consts: int, carry: int, operands: Sequence[Atom], like: JaxprEqn
    ) -> list[Any]:
        """Emits a scan over another body, of the length and direction of the scan `like`.

        Args:
          consts, carry: how many of the operands are constants, and how many after them are carried.
        """
        run, params, end = jaxpr_as_fun(body), like.params, consts + carry

        def loop(*values: Any) -> Any:
            def once(carried: Any, x: Any) -> Any:
                outs = run(*values[:consts], *carried, *x)
                return tuple(outs[:carry]), tuple(outs[carry:])

            carried, ys = lax.scan(
                once,
                tuple(values[consts:end]),
                tuple(values[end:]),
                length=params["length"],
                reverse=params["reverse"],
                unroll=params["unroll"],
            )
            return [*carried, *ys]

        return self.bind(loop, operands, like)


def _traceable(aval: Any) -> jax.ShapeDtypeStruct:
    """What to trace with for a value of `aval`; in explicit mode its type has a sharding."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
