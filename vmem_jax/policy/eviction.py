"""eviction: which live value the executor drops next at its limit.

It drops the value with the lowest cost / (bytes × time until its next use). There are hundreds of
values, of which each step changes a few. So the scores are in a heap and are computed again when they
reach the top: an unchanged score only rises as the next use comes nearer, so the heap holds lower
bounds. The executor reports every event that lowers a score: a value that appears, a use that passes,
an input of a producer that becomes live again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Program
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.recomputation import Recomputation


class Evictions:
    """The live values of one run of the executor, the next to drop first.

    Args:
      live: the values that may be dropped, each with a number that rises in order of appearance.
        `came`, `used` and `went` report changes.
      present: for every buffer, whether it is live.
      upcoming: for every buffer, how many of its uses have passed.
      end: the number of positions of the base order.

    Attributes:
      computed: how many scores were computed.
    """

    def __init__(
        self,
        program: Program,
        costs: Costs,
        recomputation: Recomputation,
        live: Mapping[int, int],
        present: Sequence[bool],
        upcoming: Sequence[int],
        end: int,
    ) -> None:
        self._producer, self._seconds = program.producer, costs.seconds
        self._reads = [step.reads for step in program.steps]
        self._nbytes = [buffer.nbytes for buffer in program.buffers]
        self._uses, self._may_drop = recomputation.uses, recomputation.may_drop
        self._live, self._present, self._upcoming, self._end = live, present, upcoming, end
        self._heap: list[tuple[float, int, int]] = []  # (score, number, buffer)
        self._entry: dict[int, tuple[float, int, int]] = {}  # buffer -> the one that holds
        self._changed: set[int] = set(live)  # whose score may have fallen
        self._watchers: dict[int, set[int]] = {}  # buffer -> whose score it is part of
        self.computed = 0

    def came(self, b: int) -> None:
        """`b` is there."""
        self._changed.add(b)
        self._changed |= self._watchers.pop(b, set())

    def used(self, b: int) -> None:
        """A use of `b` has passed."""
        self._changed.add(b)

    def went(self, b: int) -> None:
        """`b` is no longer there."""
        self._entry.pop(b, None)
        self._changed |= self._watchers.pop(b, set())

    def lowest(self, now: int, pinned: Collection[int]) -> int | None:
        """The value to drop at position `now` of the base order; None if none may be."""
        for b in self._changed:
            if b in self._live:
                self._add(b, now)
        self._changed.clear()
        aside = []
        found = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            b = entry[2]
            if self._entry.get(b) != entry:
                continue
            if b in pinned:
                aside.append(entry)
                continue
            fresh = self._add(b, now)
            if fresh is not None and fresh <= self._heap[0]:
                found = b
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def _add(self, b: int, now: int) -> tuple[float, int, int] | None:
        """The entry of `b`, which is live, in the heap; None where it may not be dropped."""
        self._entry.pop(b, None)
        uses, n = self._uses[b], self._upcoming[b]
        following = uses[n] if n < len(uses) else self._end
        if not self._may_drop(b, following):
            return None
        absence = max(following - now, 1)
        score = self._recompute_seconds(b) / (self._nbytes[b] * absence + 1)
        entry = score, self._live[b], b
        self._entry[b] = entry
        heapq.heappush(self._heap, entry)
        return entry

    def _recompute_seconds(self, b: int) -> float:
        """Seconds to make `b` again from what is live, a few missing steps deep."""
        self.computed += 1
        present, reads, producer = self._present, self._reads, self._producer
        total, seen, every, stack = 0.0, set[int](), list[int](), [b]
        while stack and len(seen) < PARAMS.farthest_recompute:
            s = producer[stack.pop()]
            if s in seen:
                continue
            seen.add(s)
            total += self._seconds[s]
            every += reads[s]
            stack += [r for r in reads[s] if not present[r]]
        for r in every:
            # what is there can only make it dearer by going, unless it takes the place of others
            if not present[r] or stack:
                self._watchers.setdefault(r, set()).add(b)
        return total
