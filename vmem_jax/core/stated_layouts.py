"""stated_layouts: gradients to kernels whose layouts a plan states, or leaves to XLA.

Stated to be row-major, such a gradient is transposed in the kernel of the update, which reads the
weights as they are and writes over them. But the weights then stay beside the copies that cuDNN reads
(`core.filters`). Left to XLA, the update is of those copies.

Some are stated in every plan, since that takes no more memory: those that are cast for their update,
where no convolution reads the very weights; those to kernels of one element in space, which are read
as they are backwards; and those that XLA takes for forward convolutions (`Convolution.is_ambiguous`),
which would read another copy of the weights, to add.
"""

from __future__ import annotations

import dataclasses

from vmem_jax.core.program import Program, Step


def may_be_left(step: Step) -> bool:
    """Whether `step` makes a gradient whose layout a plan may leave to XLA."""
    if (c := step.convolution) is not None and (c.is_ambiguous or not c.is_spatial):
        return False
    return step.row_major


def left_to_xla(program: Program) -> Program:
    """`program` where the layouts that a plan may leave to XLA are left to it."""
    steps = tuple(
        dataclasses.replace(step, row_major=False) if may_be_left(step) else step
        for step in program.steps
    )
    return dataclasses.replace(program, steps=steps)


def updated_as_they_are(program: Program) -> frozenset[int]:
    """What updates read of the size of a gradient that is stated to be row-major: kernels among them,
    of which they read no transposed copies."""
    sizes, found = program.buffers, set[int]()
    stated: set[int] = set()  # gradients, and what updates make of them
    for step in program.steps:
        if step.row_major:
            stated.update(step.writes)
        elif step.fusible and (own := stated.intersection(step.reads)):
            alike = {sizes[b].nbytes for b in own}
            stated.update(w for w in step.writes if sizes[w].nbytes in alike)
            found.update(r for r in step.reads if sizes[r].nbytes in alike)
    return frozenset(found)
