"""lanes: the two copy engines of a device, each first in, first out, over one link."""

from __future__ import annotations

import collections
import dataclasses

from vmem_jax.core.costs import Link


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """One copy on a lane: seconds since the start of the step."""

    begin: float
    end: float


class Lanes:
    """Both lanes over time. While both are busy they share the link's total bandwidth.

    `out` is device to host, `into` is host to device. Copies of a lane run in the order in which
    they were submitted, and never before that.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._now = 0.0
        self._waiting: dict[str, collections.deque[list[float]]] = {
            "out": collections.deque(),
            "into": collections.deque(),
        }  # [key, bytes left]
        self.copies: dict[tuple[str, int], Copy] = {}
        self._begun: dict[tuple[str, int], float] = {}
        self._busy_until = 0.0  # at least

    def submit(self, lane: str, key: int, nbytes: int, at: float) -> None:
        """A copy of `nbytes` begins at `at` seconds, or when the lane is free."""
        self._advance(at)
        if not self._waiting[lane]:
            self._begun[lane, key] = self._now
        self._waiting[lane].append([key, float(nbytes)])

    def wait(self, lane: str, key: int, at: float) -> float:
        """The time at which the compute lane, waiting from `at` on, continues."""
        self._advance(at)
        while (lane, key) not in self.copies:
            self._advance(self._next_end())
        return max(at, self.copies[lane, key].end)

    def is_busy(self, at: float) -> bool:
        """Whether a copy runs at `at` seconds; calls must be in chronological order."""
        if at >= self._busy_until:
            self._advance(at)
            self._busy_until = self._next_end() if any(self._waiting.values()) else at
        return at < self._busy_until

    def finish(self) -> None:
        """Runs both lanes until they are empty."""
        while any(self._waiting.values()):
            self._advance(self._next_end())

    def _rate(self, lane: str) -> float:
        alone = self._link.out if lane == "out" else self._link.into
        if all(self._waiting.values()):
            return min(alone, self._link.both * alone / (self._link.out + self._link.into))
        return alone

    def _ends(self) -> dict[str, float]:
        """The time at which the first copy of each busy lane ends, if no other ends before."""
        return {
            lane: self._now + queue[0][1] / self._rate(lane)
            for lane, queue in self._waiting.items()
            if queue
        }

    def _next_end(self) -> float:
        return min(self._ends().values())

    def _advance(self, to: float) -> None:
        while any(self._waiting.values()):
            ends = self._ends()
            then = min(to, *ends.values())
            rates = {lane: self._rate(lane) for lane in ends}
            passed, self._now = then - self._now, max(then, self._now)
            for lane, end in ends.items():
                queue = self._waiting[lane]
                if end > then:
                    queue[0][1] -= passed * rates[lane]
                    continue
                key = int(queue.popleft()[0])
                self.copies[lane, key] = Copy(self._begun.pop((lane, key)), self._now)
                if queue:
                    self._begun[lane, int(queue[0][0])] = self._now
            if then == to:
                break
        self._now = max(self._now, to)
