"""zeroed_stacks: the zeros that XLA:GPU writes to stacks of loops, in a step as it was written.

A `lax.scan` becomes a loop that carries its stacks, and begins with zeros of their size. XLA writes
these before the loop writes every slice of them. A plan asks it not to (`jax_compat.FENCE_OPTIONS`);
plain jit does not, and so writes each stack once more. In one GPT-2 medium on an H100 that was 9.4 of
131 ms.
"""

from __future__ import annotations

import dataclasses

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.primitives import nbytes
from vmem_jax.capture.shards import Shards
from vmem_jax.core.costs import Costs
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Program
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn


def as_zeroed(
    costs: Costs, program: Program, flat: ClosedJaxpr, shards: Shards, machine: Machine
) -> Costs:
    """`costs` of `program`, whose loops write their stacks alone, for the step as it was written.

    Args:
      flat: the jaxpr that the steps' equations index.
      shards: how its values are split over the devices.
      machine: whose memory the zeros are written to.
    """
    if not program.on_gpu or not any(step.body for step in program.steps):
        return costs
    eqns, seconds = compat.open_jaxpr(flat).eqns, []
    for own, step in zip(costs.seconds, program.steps, strict=True):
        scans = (eqns[i] for i in step.equations if step.body)
        more = sum(_zeros_nbytes(eqn, shards) for eqn in scans if eqn.primitive.name == "scan")
        seconds.append(own + step.times * more / machine.bandwidth)
    return dataclasses.replace(costs, seconds=tuple(seconds))


def _zeros_nbytes(eqn: JaxprEqn, shards: Shards) -> int:
    """Bytes that the scan `eqn`, with the scans in it, writes of zeros on one device."""
    length = eqn.params["length"]
    consts, carry = compat.scan_counts(eqn)
    stacks = eqn.outvars[carry:] if length > 1 else ()
    total = sum(nbytes(v.aval) // shards.count(v) for v in stacks)
    body = flatten(eqn.params["jaxpr"])
    opened = compat.open_jaxpr(body)
    if inside := [e for e in opened.eqns if e.primitive.name == "scan"]:
        values = dict(zip(opened.invars, eqn.invars, strict=True))
        within = shards.within(body, values, opened.invars[consts + carry :])
        total += length * sum(_zeros_nbytes(e, within) for e in inside)
    return total
