"""segments: the addresses of device memory as moDNN sees them, occupied or free, side by side.

Chen et al., "moDNN: Memory Optimal DNN Training on GPUs", DATE 2018, section IV-B.1: a list of
segments in the order of their addresses. Where an allocation fails, stretches of it whose blocks may
leave are looked for; where there is none, everything leaves and what is needed is put side by side.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """So many bytes at neighbouring addresses; `key` says whose they are, None for free ones."""

    nbytes: int
    key: int | None = None


class Segments:
    """A memory of `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lay([])

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order of their addresses; never two free ones side by side."""
        return tuple(self._at[start] for start in self._starts)

    @property
    def free_nbytes(self) -> int:
        """Of all free segments."""
        return sum(self._at[start].nbytes for start in self._free)

    def allocate(self, key: int, nbytes: int) -> bool:
        """Takes the first free segment that is large enough; false if there is none."""
        if not nbytes:
            return True
        for start in self._free:
            rest = self._at[start].nbytes - nbytes
            if rest >= 0:
                self._remove(start)
                self._put(start, Segment(nbytes, key))
                if rest:
                    self._put(start + nbytes, Segment(rest))
                return True
        return False

    def free(self, key: int) -> None:
        """What is `key`'s is free, if anything is."""
        if key not in self._start_of:
            return
        start = self._start_of[key]
        i = bisect.bisect_left(self._starts, start)
        near = [s for s in self._starts[max(i - 1, 0) : i + 2] if s == start or s in self._free]
        total = sum(self._at[s].nbytes for s in near)
        for s in near:
            self._remove(s)
        self._put(near[0], Segment(total))

    def hand_over(self, key: int, to: int) -> None:
        """What is `key`'s is `to`'s from now on."""
        if key in self._start_of:
            start = self._start_of.pop(key)
            self._start_of[to] = start
            self._at[start] = Segment(self._at[start].nbytes, to)

    def schemes(
        self, nbytes: int, may_leave: Callable[[int], bool]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Blocks that leave `nbytes` at neighbouring addresses, for each segment to begin with.

        Returns what may leave in the order of addresses, and the stretches as ranges of that, the
        end excluded, in rising order.
        """
        keys: list[int] = []
        found: dict[tuple[int, int], None] = {}
        stretch = collections.deque[tuple[int, int]]()  # of each segment its bytes and blocks
        total = begin = 0
        for start in self._starts:
            segment = self._at[start]
            blocks = 0
            if segment.key is not None:
                if not may_leave(segment.key):
                    stretch.clear()
                    total, begin = 0, len(keys)
                    continue
                keys.append(segment.key)
                blocks = 1
            stretch.append((segment.nbytes, blocks))
            total += segment.nbytes
            while total >= nbytes:
                found[begin, len(keys)] = None
                first, blocks = stretch.popleft()
                total -= first
                begin += blocks
        return keys, [*found]

    def pack(self, keep: Iterable[int]) -> None:
        """Frees all but `keep`, which come to lie side by side (defragmentation)."""
        kept = set(keep)
        self._lay([s for s in self.segments if s.key in kept and s.key is not None])

    def _lay(self, held: Sequence[Segment]) -> None:
        """Makes the memory anew: `held` side by side, and what is free behind them."""
        self._starts: list[int] = []
        self._free: list[int] = []  # the starts of free segments
        self._at: dict[int, Segment] = {}  # by their starts
        self._start_of: dict[int, int] = {}  # by their keys
        start = 0
        for segment in held:
            self._put(start, segment)
            start += segment.nbytes
        if start < self.capacity:
            self._put(start, Segment(self.capacity - start))

    def _put(self, start: int, segment: Segment) -> None:
        self._at[start] = segment
        bisect.insort(self._starts, start)
        if segment.key is None:
            bisect.insort(self._free, start)
        else:
            self._start_of[segment.key] = start

    def _remove(self, start: int) -> None:
        segment = self._at.pop(start)
        del self._starts[bisect.bisect_left(self._starts, start)]
        if segment.key is None:
            del self._free[bisect.bisect_left(self._free, start)]
        else:
            del self._start_of[segment.key]
