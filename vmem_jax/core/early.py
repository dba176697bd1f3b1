"""early: what XLA:GPU makes at the start, since it waits for nothing, and what holds it back.

A weight is cast for its layer from an argument alone, and zeros that a scatter or a loop adds to are
made of nothing. Left alone, XLA:GPU casts the weights of all layers before the first, and keeps the
zeros of the embedding's gradient from there to the end: 1.9 GB and 0.4 GB of a decoder of 1.1
billion weights (0.11.2). A barrier with a value of the layer before has each made where it is read.

So it is with the random words of dropout: each layer's are drawn from its key, all keys come from one
argument, and XLA:GPU draws the masks of all layers in one kernel at the start. On an H200 a mask of
16 heads by 1,024 tokens, in bits, took 0.94 ms in a kernel with 22 others, and 0.44 ms in its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from vmem_jax.core.params import PARAMS
from vmem_jax.core.program import Program
from vmem_jax.core.spines import is_read_from

Uses = Mapping[int, Sequence[tuple[int, bool]]]


def held_back(
    program: Program,
    order: Sequence[int],
    uses: Uses,
    small: int,
    forward_end: int,
    is_written_over: Callable[[int, int, int], bool],
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Positions of such steps, and what a barrier in front of each holds: first what to wait for.

    Args:
      uses: as `spines.uses_of` has them.
      small: values up to this many bytes are not worth a barrier.
      forward_end: where the forward pass ends. Behind it casts are recomputed, with fences of their
        own.
      is_written_over: (buffer, start, end) -> whether its last reader stands there and may write its
        result over it.
    """
    ran: set[int] = set()
    at_start: set[int] = set()  # buffers up to `small` that are made of arguments or of nothing
    for position, s in enumerate(order):
        step = program.steps[s]
        again, is_large = s in ran, any(program.buffers[b].nbytes > small for b in step.writes)
        ran.add(s)
        if not all(program.producer[b] < 0 or b in at_start for b in step.reads):
            continue
        if not is_large:
            at_start.update(step.writes)
        if again or not is_large or step.is_heavy or step.is_boundary:
            continue
        if step.reads and position >= forward_end:
            continue
        latest = _latest(program, order, uses, small, position, is_written_over)
        if latest is not None:
            yield position, (latest, *step.reads)


def _latest(
    program: Program,
    order: Sequence[int],
    uses: Uses,
    small: int,
    position: int,
    is_written_over: Callable[[int, int, int], bool],
) -> int | None:
    """The large value that a heavy step made last before `position`, or else any step, that is still
    read and that nothing is written over; None if there is none close by."""
    fallback = None
    for before in range(position - 1, max(position - PARAMS.early_steps, 0) - 1, -1):
        step = program.steps[order[before]]
        for b in step.writes:
            if program.is_resident[b] or program.buffers[b].nbytes <= small:
                continue
            is_read = is_read_from(uses[b], position)
            if not is_read or is_written_over(b, position, len(order)):
                continue
            if step.is_heavy:
                return b
            is_made = any(program.producer[r] >= 0 for r in step.reads)
            fallback = b if fallback is None and is_made else fallback
    return fallback
