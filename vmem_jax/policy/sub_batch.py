"""sub_batch: how many samples go through a step at once, for a memory that the whole batch exceeds.

Source: Chen et al., "moDNN: Memory Optimal DNN Training on GPUs", DATE 2018, section IV-A,
equations 1 to 3. The gradients of all sub-batches are added up, so the step computes what it did.

Differs from the paper: equation 3 has b = (M − SW) / max Mmin(t, b), bytes by bytes. What is meant is
the memory of one sample, Mmin(t, b) / b; with that its fixed point is the b that fills the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from vmem_jax.policy.base import Infeasible

_MOST_ROUNDS = 100


@dataclasses.dataclass(frozen=True)
class Task:
    """The memory of a task.

    Attributes:
      nbytes: of its inputs and its output for the whole batch; they are proportional to it.
      workspace: bytes of its fastest algorithm for so many samples; they need not be.
    """

    nbytes: int
    workspace: Callable[[int], int] = lambda samples: 0


def needed_nbytes(task: Task, samples: int, batch: int) -> int:
    """What `task` needs for `samples` of `batch`, without weights (equation 1)."""
    return -(-task.nbytes * samples // batch) + task.workspace(samples)


def lower_bound(tasks: Sequence[Task], batch: int, weights: int) -> int:
    """Bytes below which no schedule goes: one sample at a time, no workspaces (equation 2)."""
    return weights + max((-(-task.nbytes // batch) for task in tasks), default=0)


def sub_batch_size(
    tasks: Sequence[Task], batch: int, weights: int, budget: int
) -> int | Infeasible:
    """Samples of a sub-batch, at most `batch`, that leave room for the fastest algorithms; Infeasible
    where `budget` is below the lower bound.

    Equation 3, again and again until it converges. One sample where the workspaces leave no room.

    Args:
      tasks: of the whole step.
      batch: samples.
      weights: bytes that stay.
      budget: bytes.
    """
    minimum_peak = lower_bound(tasks, batch, weights)
    if minimum_peak > budget:
        return Infeasible(
            policy="modnn",
            budget=budget,
            minimum_peak=minimum_peak,
            at="one sample at a time",
            holders=f"weights {weights} B, the largest task {minimum_peak - weights} B",
        )
    free = budget - weights
    most = lambda samples: max((needed_nbytes(t, samples, batch) for t in tasks), default=0)
    samples = batch
    for _ in range(_MOST_ROUNDS):
        found = max(min(batch, free * samples // max(most(samples), 1)), 1)
        if found == samples:
            break
        samples = found
    while samples > 1 and most(samples) > free:
        samples -= 1
    return samples
