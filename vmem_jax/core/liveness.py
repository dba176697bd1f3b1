"""liveness: the live ranges of all values in an order, and the live bytes.

A value is live from the step that writes it to its last read before it is written again. A search
needs this some hundred times for one plan of tens of thousands of steps, so it is computed in arrays
(`core.touched`): the accesses of an order, sorted by buffer, are cut at each write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import Program, Step
from vmem_jax.core.touched import parts


def step_nbytes(program: Program, step: Step, among: Collection[int] | None = None) -> int:
    """The least bytes that are live beside the residents while `step` runs.

    Args:
      among: counts these buffers alone, and no workspace; None for all.
    """
    resident, buffers = program.is_resident, program.buffers
    counts = lambda b: not resident[b] and (among is None or b in among)
    used = {b for b in (*step.reads, *step.writes) if counts(b)}
    over = {w for r, w in step.in_place if counts(r) and counts(w)}
    size = lambda ids: sum(buffers[b].nbytes for b in ids)
    return size(used) - size(over) + (step.workspace if among is None else 0)


def least_nbytes(program: Program) -> int:
    """A lower bound of the peak of any order of `program`, in bytes: residents and largest step."""
    largest = max((step_nbytes(program, step) for step in program.steps), default=0)
    return program.resident_nbytes + largest


def taken_over(program: Program, step: Step, dying: Collection[int]) -> dict[int, int]:
    """The pairs of a buffer that dies in `step` and one that is written into its memory."""
    resident = program.is_resident
    found: dict[int, int] = {}
    for r, w in step.in_place:
        dies = r in dying and not resident[r] and not resident[w]
        if dies and r not in found and w not in found.values():
            found[r] = w
    return found


@dataclasses.dataclass(frozen=True)
class Lives:
    """The live ranges, in one order, of all buffers but the residents.

    Attributes:
      buffer: the buffer of each live range.
      first, last: the positions of its write and of its last read.
      dying: for each access of the order's steps, in sequence, whether the buffer dies there.
    """

    buffer: np.ndarray
    first: np.ndarray
    last: np.ndarray
    dying: np.ndarray


def lives(program: Program, order: Sequence[int]) -> Lives:
    """The live ranges in `order` of all buffers but the residents, by buffer and position."""
    touched = program.touched
    entry, position = parts(touched.begin, order)
    by_buffer = np.argsort(touched.buffer[entry], kind="stable")
    buffer, writes = touched.buffer[entry][by_buffer], touched.writes[entry][by_buffer]
    ends = np.ones(len(entry), bool)
    ends[:-1] = (buffer[1:] != buffer[:-1]) | writes[1:]
    dying = np.empty_like(ends)
    dying[by_buffer] = ends
    position = position[by_buffer]
    begun, ended = np.flatnonzero(writes), np.flatnonzero(ends)
    last = position[ended[np.searchsorted(ended, begun)]]
    return Lives(buffer[begun], position[begun], last, dying)


def last_reads(program: Program, order: Sequence[int]) -> list[list[int]]:
    """For each position, the buffers that die after it: read there, and not again before a write."""
    touched, dying = program.touched, lives(program, order).dying
    entry, position = parts(touched.begin, order)
    found: list[list[int]] = [[] for _ in order]
    for at, b in zip(position[dying].tolist(), touched.buffer[entry[dying]].tolist(), strict=True):
        found[at].append(b)
    return found


def live_nbytes(program: Program, order: Sequence[int]) -> np.ndarray:
    """For each position, the live bytes with the step's workspace, without the residents. A write in
    memory of a dying read counts once."""
    touched, found = program.touched, lives(program, order)
    steps = np.asarray(order, np.int64)
    change = np.zeros(len(steps) + 1, np.int64)
    np.add.at(change, found.first, touched.nbytes[found.buffer])
    np.subtract.at(change, found.last + 1, touched.nbytes[found.buffer])
    live = np.cumsum(change)[:-1] + touched.workspace[steps]
    counts = touched.begin[steps + 1] - touched.begin[steps]
    begin = np.cumsum(counts) - counts
    pair, position = parts(touched.over_begin, steps)
    dies = found.dying[begin[position] + touched.over_read[pair]]
    dies &= ~touched.has_choice[steps[position]]
    written = np.stack([position[dies], touched.over_write[pair[dies]]])
    position, over = np.unique(written, axis=1)  # over one of what dies, where there are several
    np.subtract.at(live, position, touched.nbytes[over])
    for p in np.flatnonzero(touched.has_choice[steps]).tolist():
        s = order[p]
        dying = found.dying[begin[p] : begin[p] + counts[p]]
        dead = touched.buffer[touched.begin[s] : touched.begin[s + 1]][dying].tolist()
        taken = taken_over(program, program.steps[s], dead).values()
        live[p] -= touched.nbytes[[*taken]].sum()
    return live


def staged_spans(
    program: Program, order: Sequence[int], transfers: Sequence[Transfer]
) -> dict[int, tuple[int, int]]:
    """For each hosted buffer that is used the first and last position at which it is on the device:
    an input from its fetch to its last read, an output until it is gone and no longer read."""
    streamed = program.streamed_in | program.streamed_out
    spans: dict[int, tuple[int, int]] = {}
    for position, s in enumerate(order):
        step = program.steps[s]
        for b in (*step.reads, *step.writes):
            if b in streamed:
                spans[b] = spans.get(b, (position, position))[0], position
    for t in transfers:
        if t.buffer in program.streamed_in:
            spans[t.buffer] = t.fetch, spans[t.buffer][1]
        elif t.buffer in program.streamed_out:
            first, last = spans[t.buffer]
            spans[t.buffer] = first, max(last, t.gone - 1)
    return spans
