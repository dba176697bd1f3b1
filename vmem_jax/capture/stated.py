"""stated: says how a result is split where XLA's partitioner would have two choices.

A product [n, i] · [i, j] whose operands are split along n and j, or along n and i, by one axis of the
mesh cannot have both: one operand has to be gathered. In fully sharded data parallelism that is the
weight. The partitioner may choose the activations, and then sends these between the devices, and
holds them whole. The Program of a step counts the smaller one as gathered (`shards`), so the step
says so, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.editor import spliced
from vmem_jax.capture.flatten import inline
from vmem_jax.capture.shards import Shards, follow_shards
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn


def with_stated_splits(flat: ClosedJaxpr, shardings: Sequence[Any]) -> ClosedJaxpr:
    """`flat`, in which a constraint follows each result that XLA could split in two ways.

    Args:
      shardings: of its arguments (None: one device). Unless all axes of their mesh are XLA's to
        decide about, nothing is said.
    """
    if not any(s is not None and s.num_devices > 1 for s in shardings):
        return flat
    shards = follow_shards(flat, shardings)
    auto = jax.sharding.AxisType.Auto
    if shards.mesh is None or any(kind != auto for kind in shards.mesh.axis_types):
        return flat
    return _stated(flat, shards)


def _stated(flat: ClosedJaxpr, shards: Shards) -> ClosedJaxpr:
    assert shards.mesh is not None
    opened = compat.open_jaxpr(flat)
    eqns: list[JaxprEqn] = []
    for eqn in opened.eqns:
        if eqn.primitive.name == "scan" and not eqn.effects:
            eqns.append(_stated_scan(eqn, shards))
        elif _moves(eqn, shards) and (spec := shards.stated(eqn.outvars[0])) is not None:
            eqns += _constrained(eqn, jax.NamedSharding(shards.mesh, spec))
        else:
            eqns.append(eqn)
    parts = opened.constvars, compat.constants(flat), opened.invars, opened.outvars, eqns
    return compat.close(*parts, like=flat)


def _moves(eqn: JaxprEqn, shards: Shards) -> bool:
    """Whether devices have to send operands of a product, or sums of it, to have its shards."""
    return bool(shards.gathered(eqn) or shards.scattered_nbytes(eqn))


def _constrained(eqn: JaxprEqn, sharding: jax.NamedSharding) -> list[JaxprEqn]:
    [out] = eqn.outvars
    made = compat.new_var(out.aval)
    state = lambda x: lax.with_sharding_constraint(x, sharding)
    constraint, _ = spliced(state, [made], eqn, out)
    return [eqn.replace(outvars=[made]), *constraint]


def _stated_scan(eqn: JaxprEqn, shards: Shards) -> JaxprEqn:
    body = inline(eqn.params["jaxpr"])
    if compat.constants(body):
        return eqn  # the body of a scan has none
    invars = compat.open_jaxpr(body).invars
    slices = invars[sum(compat.scan_counts(eqn)) :]
    within = shards.within(body, dict(zip(invars, eqn.invars, strict=True)), slices)
    return eqn.replace(params={**eqn.params, "jaxpr": _stated(body, within)})
