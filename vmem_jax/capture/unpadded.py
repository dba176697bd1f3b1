"""unpadded: what softmaxes take whose rows are not padded, by plain jit.

Of rows that are not aligned XLA makes a kernel for the maxima, one for the sums, and one for the
probabilities; their gradient reads the rows for a sum, and once more. The rows that products read and
make are not aligned, either (`padded_rows`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from vmem_jax.capture import odd_rows
from vmem_jax.capture.columns import is_reduction
from vmem_jax.capture.padded_rows import Lengths
from vmem_jax.capture.primitives import flops, shape_of
from vmem_jax.capture.softmax import reduces_rows
from vmem_jax.core.costs import Costs
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Phase, Program, Step
from vmem_jax.jax_compat import JaxprEqn, Var

_OF_FORWARD = 2
"""Reductions that a gradient takes again, and plain jit keeps: maxima and sums."""


def as_unpadded(
    costs: Costs,
    program: Program,
    eqns: Sequence[JaxprEqn],
    variables: Sequence[Var],
    lengths: Lengths,
    machine: Machine,
) -> tuple[Costs, Program]:
    """`costs` and `program`, whose softmaxes are of padded rows, for the step as it was written.

    Args:
      eqns: those of the steps of `program`.
      variables: of its buffers.
    """
    if not lengths:
        return costs, program
    seconds, steps = [*costs.seconds], [*program.steps]
    for s, step in enumerate(program.steps):
        shapes = {b: shape_of(variables[b]) for b in (*step.reads, *step.writes)}
        padded = {b: shape for b, shape in shapes.items() if shape in lengths}
        if not padded or not (step.fusible or step.op == "dot_general"):
            continue
        shares = {b: lengths[shape] / shape[-1] for b, shape in padded.items()}
        [shape, *_] = padded.values()
        rows = math.prod(shape[:-1]), lengths[shape]
        passes = _passes(step, program, [eqns[i] for i in step.equations], shares, rows)
        alone = machine.seconds(step)
        seconds[s] *= sum(map(machine.seconds, passes)) / alone if alone else 1.0
        steps[s] = dataclasses.replace(step, aligned=passes[0].aligned, nbytes=passes[0].nbytes)
    program = dataclasses.replace(program, steps=tuple(steps))
    return dataclasses.replace(costs, seconds=tuple(seconds)), program


def _passes(
    step: Step,
    program: Program,
    eqns: Sequence[JaxprEqn],
    shares: Mapping[int, float],
    rows: tuple[int, int],
) -> list[Step]:
    """What runs in place of `step`: what makes its results first, then a pass for each reduction that
    it has inside.

    Args:
      eqns: of `step`.
      shares: of each padded buffer that of its elements which are no padding.
      rows: how many there are, and their length.
    """
    nbytes = lambda buffers: sum(int(program.buffers[b].nbytes * shares.get(b, 1)) for b in buffers)
    reads, share = nbytes(step.reads), min(shares.values())
    made = dataclasses.replace(
        step,
        nbytes=reads + nbytes(step.writes),
        written=int(share * step.written),
        aligned=False,
    )
    if not step.fusible:
        return [dataclasses.replace(made, flops=int(share * step.flops))]
    inside = [eqn for eqn in eqns[:-1] if is_reduction(eqn) and _is_of(rows[0], eqn)]
    rest = step.flops - sum(flops(eqn, in_tile=True) for eqn in inside)
    made = dataclasses.replace(made, flops=int(share * rest))
    elements = rows[0] * rows[1] * sum(b in shares for b in step.reads)
    reduced = dataclasses.replace(made, nbytes=reads, flops=odd_rows.of_rows(*rows, elements))
    if is_reduction(eqns[-1]) and _is_of(rows[0], eqns[-1]):
        return [dataclasses.replace(made, flops=max(made.flops, reduced.flops))]
    kept = step.phase is Phase.BACKWARD and any(e.primitive.name == "reduce_max" for e in inside)
    return [made] + [reduced] * (len(inside) - (_OF_FORWARD if kept else 0))


def _is_of(rows: int, eqn: JaxprEqn) -> bool:
    """Whether the reduction `eqn` reduces so many rows, of more than an element."""
    before, after = (math.prod(v.aval.shape) for v in (eqn.invars[0], eqn.outvars[0]))
    return reduces_rows(eqn) and after == rows < before
