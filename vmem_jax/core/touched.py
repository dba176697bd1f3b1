"""touched: what the steps of a Program read and write, in arrays, for what is reckoned many times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

Access = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...], int]
"""Of a step the buffers that it reads and writes, its pairs (read, write) in place, its workspace."""


@dataclasses.dataclass(frozen=True)
class Touched:
    """What steps touch, residents left out: entries of all steps, one behind the other.

    Attributes:
      begin: for each step where its entries begin, and then where the last one's end.
      buffer: which buffer; of each step what it reads comes first.
      writes: whether it is written there.
      nbytes: of every buffer.
      workspace: bytes, of every step.
      over_begin: as `begin`, for pairs of what may be written over what is read.
      over_read: of such a pair the read, counted from where the step's entries begin.
      over_write: the buffer that may be written over it.
      has_choice: steps of which one read may hand its memory to one of several writes.
    """

    begin: np.ndarray
    buffer: np.ndarray
    writes: np.ndarray
    nbytes: np.ndarray
    workspace: np.ndarray
    over_begin: np.ndarray
    over_read: np.ndarray
    over_write: np.ndarray
    has_choice: np.ndarray

    @classmethod
    def of(
        cls, steps: Iterable[Access], nbytes: Sequence[int], resident: Sequence[bool]
    ) -> Touched:
        """What `steps` touch; `nbytes` and `resident` are of every buffer."""
        begin, buffer, writes = [0], list[int](), list[bool]()
        over_begin, over_read, over_write = [0], list[int](), list[int]()
        has_choice, workspaces = list[bool](), list[int]()
        for step_reads, step_writes, in_place, workspace in steps:
            reads = [b for b in step_reads if not resident[b]]
            written = [b for b in step_writes if not resident[b]]
            workspaces.append(workspace)
            buffer += reads + written
            writes += [False] * len(reads) + [True] * len(written)
            begin.append(len(buffer))
            over = [(r, w) for r, w in in_place if not resident[r] and not resident[w]]
            over_read += [reads.index(r) for r, _ in over]
            over_write += [w for _, w in over]
            over_begin.append(len(over_read))
            has_choice.append(len({r for r, _ in over}) < len(over))
        whole = lambda values: np.array(values, np.int64)
        return cls(
            whole(begin),
            whole(buffer),
            np.array(writes, bool),
            whole(nbytes),
            whole(workspaces),
            whole(over_begin),
            whole(over_read),
            whole(over_write),
            np.array(has_choice, bool),
        )


def parts(begin: np.ndarray, order: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries of the steps of `order`, one behind the other, and of each the position in it."""
    order = np.asarray(order, np.int64)
    counts = begin[order + 1] - begin[order]
    position = np.repeat(np.arange(len(order)), counts)
    ends = np.cumsum(counts)
    entry = np.arange(len(position)) + np.repeat(begin[order] - (ends - counts), counts)
    return entry, position
