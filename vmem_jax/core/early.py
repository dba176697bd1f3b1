"""early: what XLA:GPU makes at the start, since it waits for nothing, and what holds it back.

A weight is cast for its layer from an argument alone, and zeros that a scatter or a loop adds to are
made of nothing. Left alone, XLA:GPU casts the weights of all layers before the first, and keeps the
zeros of the embedding's gradient from there to the end: 1.9 GB and 0.4 GB of a decoder of 1.1
billion weights (0.11.2). A barrier with a value of the layer before has each made where it is read.
Each cast may be small and all together not: a ViT-L has 144 of 2 to 8 MiB, 576 MiB in all.

So it is with the random words of dropout: each layer's are drawn from its key, all keys come from one
argument, and XLA:GPU draws the masks of all layers in one kernel at the start. On an H200 a mask of
16 heads by 1,024 tokens, in bits, took 0.94 ms in a kernel with 22 others, and 0.44 ms in its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from vmem_jax.core.params import PARAMS
from vmem_jax.core.program import BEGIN, Program
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
      small: values up to this many bytes are not worth a barrier, unless there are many.
      forward_end: where the forward pass ends. Behind it casts are recomputed, with fences of their
        own.
      is_written_over: (buffer, start, end) -> whether its last reader stands there and may write its
        result over it.
    """
    made = lambda limit: _made_at_start(program, order, limit, forward_end)
    negligible = _negligible([nbytes for _, nbytes in made(small)], small)
    for position, nbytes in made(negligible):
        step = program.steps[order[position]]
        if nbytes <= negligible:
            continue
        latest = _latest(program, order, uses, small, position, is_written_over)
        if latest is not None:
            yield position, (latest, *step.reads)


def _made_at_start(
    program: Program, order: Sequence[int], limit: int, forward_end: int
) -> Iterator[tuple[int, int]]:
    """(position, bytes of its largest value) of the light steps that read nothing, or in the forward
    pass arguments alone or values up to `limit` bytes that are made so; where they first run."""
    ran: set[int] = set()
    at_start: set[int] = set()  # buffers up to `limit`
    for position, s in enumerate(order):
        step = program.steps[s]
        again = s in ran
        ran.add(s)
        if step.op == BEGIN:  # what sub-batches are handed
            at_start.update(b for b in step.writes if program.buffers[b].nbytes <= limit)
            continue
        if not all(program.producer[b] < 0 or b in at_start for b in step.reads):
            continue
        nbytes = max((program.buffers[b].nbytes for b in step.writes), default=0)
        if nbytes <= limit:
            at_start.update(step.writes)
        is_cast_again = bool(step.reads) and position >= forward_end
        if not (again or step.is_heavy or step.is_boundary or is_cast_again):
            yield position, nbytes


def _negligible(sizes: Sequence[int], small: int) -> int:
    """The most bytes, up to `small`, of a value that may be made at the start: those of `sizes` up to
    that size take no more than `early_small` times `small` together."""
    together = 0
    for nbytes in sorted(nbytes for nbytes in sizes if nbytes <= small):
        together += nbytes
        if together > PARAMS.early_small * small:
            return nbytes - 1
    return small


def _latest(
    program: Program,
    order: Sequence[int],
    uses: Uses,
    small: int,
    position: int,
    is_written_over: Callable[[int, int, int], bool],
) -> int | None:
    """The large value that a heavy step made last before `position`, or else any step, that is still
    read and that nothing is written over; None if there is none close by. In sub-batches it is one of
    theirs."""
    fallback = None
    for before in range(position - 1, max(position - PARAMS.early_steps, 0) - 1, -1):
        step = program.steps[order[before]]
        if step.is_boundary:
            break
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
