"""loops: the stacks of a flat jaxpr, values that one loop makes slice by slice and another reads
in reverse.

A `lax.scan` over layers, differentiated, is two scans: one forwards, which stacks what it saves, and
one backwards over these stacks. To a Program each scan is one step and each stack one buffer, which
no plan can split. But slice by slice a stack needs not exist on the device at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.primitives import is_array
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var


def stacks(flat: ClosedJaxpr) -> dict[Var, int]:
    """Every stack of `flat` and its number of slices."""
    opened = compat.open_jaxpr(flat)
    uses: dict[Var, list[JaxprEqn | None]] = {}
    for eqn in opened.eqns:
        for a in eqn.invars:
            if isinstance(a, Var):
                uses.setdefault(a, []).append(eqn)
    for a in opened.outvars:
        if isinstance(a, Var):
            uses.setdefault(a, []).append(None)
    found = {}
    for eqn in opened.eqns:
        if eqn.primitive.name != "scan":
            continue
        _, carry = compat.scan_counts(eqn)
        made = compat.open_jaxpr(eqn.params["jaxpr"]).outvars
        for result in range(carry, len(eqn.outvars)):
            v, reader = eqn.outvars[result], uses.get(eqn.outvars[result], [])
            if len(reader) == 1 and isinstance(made[result], Var) and is_array(v.aval):
                if compat.is_in_host_memory(v.aval):
                    continue  # the user's own policy has it there already
                if _reads_in_reverse(reader[0], v, eqn):
                    found[v] = eqn.params["length"]
    return found


def stacked_alone(carried: Sequence[Any], stacked: Sequence[Any]) -> frozenset[Var]:
    """Those of `stacked` that no next iteration has."""
    values = lambda atoms: frozenset(a for a in atoms if isinstance(a, Var))
    return values(stacked) - values(carried)


def _reads_in_reverse(reader: JaxprEqn | None, v: Var, writer: JaxprEqn) -> bool:
    if reader is None or reader.primitive.name != "scan":
        return False
    if not compat.open_jaxpr(reader.params["jaxpr"]).eqns:
        return False  # its results are its operands, and there is nothing to hide a copy under
    same_length = reader.params["length"] == writer.params["length"] > 1
    return (
        same_length
        and reader.params["reverse"] != writer.params["reverse"]
        and reader.invars.index(v) >= sum(compat.scan_counts(reader))
    )
