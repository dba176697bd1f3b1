"""segments: the addresses of device memory as moDNN sees them, occupied or free, side by side.

Chen et al., "moDNN: Memory Optimal DNN Training on GPUs", DATE 2018, section IV-B.1: a list of
segments in the order of their addresses. Where an allocation fails, stretches of it whose blocks may
leave are looked for; where there is none, everything leaves and what is needed is put side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """So many bytes at neighbouring addresses; `key` says whose they are, None for free ones."""

    nbytes: int
    key: int | None = None


class Segments:
    """A memory of `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._list = [Segment(capacity)] if capacity > 0 else []

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order of their addresses; never two free ones side by side."""
        return tuple(self._list)

    @property
    def free_nbytes(self) -> int:
        """Of all free segments."""
        return sum(segment.nbytes for segment in self._list if segment.key is None)

    def allocate(self, key: int, nbytes: int) -> bool:
        """Takes the first free segment that is large enough; false if there is none."""
        for i, segment in enumerate(self._list):
            if segment.key is None and segment.nbytes >= nbytes:
                rest = segment.nbytes - nbytes
                self._list[i : i + 1] = [Segment(nbytes, key), *([Segment(rest)] if rest else [])]
                return True
        return nbytes == 0

    def free(self, key: int) -> None:
        """What is `key`'s is free, if anything is."""
        self._set([Segment(s.nbytes) if s.key == key else s for s in self._list])

    def hand_over(self, key: int, to: int) -> None:
        """What is `key`'s is `to`'s from now on."""
        self._list = [Segment(s.nbytes, to) if s.key == key else s for s in self._list]

    def schemes(self, nbytes: int, may_leave: Callable[[int], bool]) -> list[tuple[int, ...]]:
        """Blocks that leave `nbytes` at neighbouring addresses, for each segment to begin with."""
        found: list[tuple[int, ...]] = []
        for first in range(len(self._list)):
            total, keys = 0, []
            for segment in self._list[first:]:
                if segment.key is not None:
                    if not may_leave(segment.key):
                        break
                    keys.append(segment.key)
                total += segment.nbytes
                if total >= nbytes:
                    found.append(tuple(keys))
                    break
        return list(dict.fromkeys(found))

    def pack(self, keep: Iterable[int]) -> None:
        """Frees all but `keep`, which come to lie side by side (defragmentation)."""
        kept = set(keep)
        held = [s for s in self._list if s.key in kept and s.key is not None]
        rest = self.capacity - sum(s.nbytes for s in held)
        self._list = [*held, *([Segment(rest)] if rest else [])]

    def _set(self, segments: Iterable[Segment]) -> None:
        merged: list[Segment] = []
        for segment in segments:
            if merged and segment.key is None and merged[-1].key is None:
                merged[-1] = Segment(merged[-1].nbytes + segment.nbytes)
            else:
                merged.append(segment)
        self._list = merged
