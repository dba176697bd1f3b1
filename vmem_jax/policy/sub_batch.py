"""sub_batch: how many samples go through a step at once, for a memory that the whole batch exceeds.

Source: Chen et al., "moDNN: Memory Optimal DNN Training on GPUs", DATE 2018, section IV-A,
equations 1 to 3. The gradients of all sub-batches are added up, so the step computes what it did.

Differs from the paper: equation 3 has b = (M − SW) / max Mmin(t, b), bytes by bytes. What is meant is
the memory of one sample, Mmin(t, b) / b; with that its fixed point is the b that fills the memory.
Some data of a task does not grow with b (a gradient of weights), so the iteration is bracketed. As
in the paper the totals of gradients are weights, which always stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.liveness import last_reads, taken_over
from vmem_jax.core.planned import with_convolutions
from vmem_jax.core.program import BEGIN, Program
from vmem_jax.policy.params import PARAMS


@dataclasses.dataclass(frozen=True)
class Needed:
    """What a step needs for some number of samples at once, in bytes.

    Attributes:
      weights: arguments, outputs and the totals of gradients, which always stay (SW).
      task: the largest task with its workspace, beside them (equation 1).
    """

    weights: int
    task: int


def needed(program: Program, convolutions: Mapping[int, Configuration]) -> Needed:
    """What `program` needs, of the whole batch or of one sub-batch, with `convolutions`.

    Of one sub-batch, only the tasks on samples count: the others do not depend on its size.
    """
    program = with_convolutions(program, convolutions.items())
    order = range(len(program.steps))
    begins = (step for step in program.steps if step.op == BEGIN)
    totals = {b for step in begins for b in step.writes if not program.is_resident[b]}
    dying, most = last_reads(program, order), 0
    for step, dead in zip(program.steps, dying, strict=True):
        if step.times == program.sub_batches and not step.is_boundary:
            taken = {*taken_over(program, step, dead).values()}
            own = {b for b in (*step.reads, *step.writes) if not program.is_resident[b]}
            own -= taken | totals
            most = max(most, step.workspace + sum(program.buffers[b].nbytes for b in own))
    sizes = (program.buffers[b].nbytes for b in totals)
    return Needed(program.resident_nbytes + sum(sizes), most)


def sub_batch_size(need: Callable[[int], Needed], batch: int, budget: int) -> int:
    """The most samples, up to `batch`, that fit at once into `budget` bytes; 0 if not one does.

    Equation 3, again and again until it converges.

    Args:
      need: samples -> what the step needs for them; the more samples the more.
    """
    fits, over, samples, rounds = 0, batch + 1, batch, 0
    while over - fits > 1:
        now = need(samples)
        if now.weights + now.task <= budget:
            fits = samples
        else:
            over = samples
        rounds += 1
        found = samples * max(budget - now.weights, 0) // max(now.task, 1)
        found = found if rounds < PARAMS.size_rounds else (fits + over) // 2
        samples = min(max(found, fits + 1), over - 1)
    return fits


@dataclasses.dataclass(frozen=True)
class Task:
    """The bytes of a task's inputs and output for the whole batch, in proportion to it."""

    nbytes: int


def lower_bound(tasks: Sequence[Task], batch: int, weights: int) -> int:
    """Bytes below which no schedule goes: one sample at a time, no workspaces (equation 2)."""
    return weights + max((-(-task.nbytes // batch) for task in tasks), default=0)
