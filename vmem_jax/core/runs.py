"""runs: where runs of fences start (`core.fences`), and which steps wait for the last one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from vmem_jax.core.program import Phase, Program
from vmem_jax.core.simulate import Timeline


def late(program: Program, order: Sequence[int]) -> list[bool]:
    """For each position whether its step is of the forward pass and stands behind a backward one: a
    backward loop computes it again just before it is read."""
    found, backward = [], False
    for s in order:
        step = program.steps[s]
        backward = backward or (step.phase is Phase.BACKWARD and step.is_heavy)
        found.append(backward and step.phase is Phase.FORWARD and not step.is_boundary)
    return found


def forward_end(program: Program, order: Sequence[int], small: int) -> int:
    """The position of the first backward step of something larger than `small`.

    The share of one token in the loss may stand at the very start of the order, and so may a scatter
    of ones to the labels.
    """
    for position, s in enumerate(order):
        step = program.steps[s]
        touched = (program.buffers[b].nbytes for b in (*step.reads, *step.writes))
        if step.phase is Phase.BACKWARD and max(touched, default=0) > small:
            return position
    return len(order)


def anew(program: Program, order: Sequence[int]) -> Iterator[int]:
    """Positions of heavy steps that read nothing which a heavy step made, or was made of that, since
    the last such position."""
    reached: set[int] = set()
    for position, s in enumerate(order):
        step = program.steps[s]
        if step.is_boundary:
            reached = set()
        elif step.is_heavy or not reached.isdisjoint(step.reads):
            if step.is_heavy and reached and reached.isdisjoint(step.reads):
                yield position
                reached = set()
            reached.update(step.writes)


def before_loops(
    program: Program,
    order: Sequence[int],
    starts: Sequence[int],
    frees: Callable[[int, int], bool],
) -> Iterator[int]:
    """Positions of loops of the backward pass behind a product of their own run that frees something
    large, such as the gradient of the logits. XLA may run it behind the loop, and keep what it reads
    throughout.

    Args:
      starts: where runs start, in rising order.
      frees: whether a step, by its position, is the last before a position to read something large.
    """
    for start, end in zip(starts, (*starts[1:], len(order)), strict=True):
        for position in range(start + 1, end):
            step = program.steps[order[position]]
            if not step.body or step.phase is not Phase.BACKWARD:
                continue
            before = range(start, position)
            if any(program.steps[order[p]].is_heavy and frees(p, position) for p in before):
                yield position
                break


def too_early(
    program: Program,
    order: Sequence[int],
    starts: Sequence[int],
    timeline: Timeline,
    again: Sequence[bool],
    small: int,
) -> Iterator[int]:
    """Positions of recomputations that read nothing of their run, and would raise the peak of
    `timeline` by more than `small` bytes at its start.

    Args:
      starts: where runs start, in rising order.
      again: for each position whether its step ran before.
    """
    live = timeline.live_nbytes
    for start, end in itertools.pairwise([*starts, len(order)]):
        roots, made = [], set[int]()
        for position in range(start, end):
            step = program.steps[order[position]]
            if again[position] and step.is_heavy and made.isdisjoint(step.reads):
                roots.append(position)
            made.update(step.writes)
        for position, until in itertools.pairwise([*roots, end]):
            if position == start:
                continue
            step = program.steps[order[position]]
            new = step.workspace + sum(program.buffers[b].nbytes for b in step.writes)
            rise = max(live[position:until]) - live[position] + new
            if max(live[start:position]) + rise > timeline.peak + small:
                yield position
                start = position
