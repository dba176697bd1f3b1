"""packing: the offset of each parked tensor in an arena that is as small as possible.

A tensor is parked over an interval of time. Two tensors whose intervals overlap must not share bytes.
No packing is smaller than the most bytes parked at once. The tensors of a training step return in the
reverse order in which they left, so their intervals nest and the packing reaches that bound. In
general this is dynamic storage allocation, which is NP-hard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from vmem_jax.core.params import PARAMS

ALIGNMENT = 256
"""Bytes: what CUDA's own allocator aligns to, and enough for any vector load."""


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A tensor of `nbytes`, parked at every time from `first` to `last`, both included. At the times
    `handed` another one takes its bytes over.

    Raises:
      ValueError: `nbytes` is negative, or `last` is before `first`.
    """

    nbytes: int
    first: int
    last: int
    handed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.last < self.first:
            raise ValueError(f"{self} has negative bytes, or ends before it begins.")

    def meets(self, other: Interval) -> bool:
        """Whether there is a time at which both are parked."""
        return self.first <= other.last and other.first <= self.last


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """The offsets of tensors in an arena.

    Attributes:
      offsets: bytes, one for each interval, multiples of the alignment.
      nbytes: the size of the arena in bytes.
      lower_bound: the most bytes parked at once, each tensor rounded up to the alignment.
    """

    offsets: tuple[int, ...]
    nbytes: int
    lower_bound: int


def pack(intervals: Sequence[Interval], alignment: int = ALIGNMENT) -> Packing:
    """Offsets for `intervals` in a small arena. Deterministic.

    The arena is the smallest possible if the intervals nest (any two are disjoint, or one contains
    the other), or if they are few enough for an exact search; else it is the best of several
    heuristics.

    Args:
      intervals: any number, in any order.
      alignment: bytes.

    Raises:
      ValueError: `alignment` is not positive.
    """
    if alignment < 1:
        raise ValueError(f"`alignment` must be at least 1 byte. Got {alignment}.")
    sizes = [round_up(i.nbytes, alignment) for i in intervals]
    bound = _most_at_once(intervals, sizes)
    meeting = _meeting(intervals)

    best: tuple[int, list[int]] | None = None
    for order in _orders(intervals, sizes):
        offsets = _first_fit(order, sizes, meeting)
        total = _total(offsets, sizes)
        if best is None or total < best[0]:
            best = total, offsets
        if total == bound:
            break
    assert best is not None
    if best[0] > bound and len(intervals) <= PARAMS.packed_exactly:
        best = _Exact(sizes, meeting, bound, best).search()
    return Packing(tuple(best[1]), best[0], bound)


def round_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` up to the next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def _most_at_once(intervals: Sequence[Interval], sizes: Sequence[int]) -> int:
    changes = [(i.first, 1, n) for i, n in zip(intervals, sizes, strict=True)]
    changes += [(i.last + 1, 0, -n) for i, n in zip(intervals, sizes, strict=True)]
    most = now = 0
    for _, _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _meeting(intervals: Sequence[Interval]) -> list[list[int]]:
    """For each interval, the others that it meets."""
    order = sorted(range(len(intervals)), key=lambda i: intervals[i].first)
    meeting: list[list[int]] = [[] for _ in intervals]
    open_: list[int] = []
    for i in order:
        open_ = [j for j in open_ if intervals[j].last >= intervals[i].first]
        for j in open_:
            meeting[i].append(j)
            meeting[j].append(i)
        open_.append(i)
    return meeting


def _orders(intervals: Sequence[Interval], sizes: Sequence[int]) -> list[list[int]]:
    """Orders in which first fit does well; the first is exact for intervals that nest."""
    span: Callable[[int], int] = lambda i: intervals[i].last - intervals[i].first + 1
    keys: list[Callable[[int], tuple[int, ...]]] = [
        lambda i: (intervals[i].first, -intervals[i].last),
        lambda i: (-sizes[i], -span(i)),
        lambda i: (-sizes[i] * span(i),),
        lambda i: (-span(i), -sizes[i]),
        lambda i: (-intervals[i].last, intervals[i].first),
    ]
    return [sorted(range(len(intervals)), key=key) for key in keys]


def _first_fit(
    order: Sequence[int], sizes: Sequence[int], meeting: Sequence[Sequence[int]]
) -> list[int]:
    """Each at the lowest offset that is free for as long as it is parked."""
    offsets = [-1] * len(sizes)
    for i in order:
        offset = 0
        for begin, end in sorted(
            (offsets[j], offsets[j] + sizes[j]) for j in meeting[i] if offsets[j] >= 0
        ):
            if begin - offset >= sizes[i]:
                break
            offset = max(offset, end)
        offsets[i] = offset
    return offsets


def _total(offsets: Sequence[int], sizes: Sequence[int]) -> int:
    return max((o + n for o, n in zip(offsets, sizes, strict=True)), default=0)


class _Exact:
    """Branch and bound over the order in which tensors are laid on top of each other.

    Some best packing has every tensor on the floor or on top of one that it meets. Laid down from
    the lowest offset upwards, each then lies on the highest of those already there that it meets.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        meeting: Sequence[Sequence[int]],
        bound: int,
        best: tuple[int, list[int]],
    ) -> None:
        self.sizes, self.meeting, self.bound, self.best = sizes, meeting, bound, best
        self.states = 0

    def search(self) -> tuple[int, list[int]]:
        self._lay([-1] * len(self.sizes), 0, 0)
        return self.best

    def _lay(self, offsets: list[int], floor: int, total: int) -> None:
        if self.best[0] == self.bound or self.states > PARAMS.packing_states:
            return
        self.states += 1
        left = [i for i, offset in enumerate(offsets) if offset < 0]
        if not left:
            self.best = total, list(offsets)
            return
        candidates = []
        for i in left:
            tops = (offsets[j] + self.sizes[j] for j in self.meeting[i] if offsets[j] >= 0)
            candidates.append((max(tops, default=0), i))
        if max(offset + self.sizes[i] for offset, i in candidates) >= self.best[0]:
            return  # that one will not come lower
        for offset, i in sorted(candidates, key=lambda pair: (pair[0], -self.sizes[pair[1]])):
            if offset < floor:
                continue  # laid down earlier, it would have been tried there
            offsets[i] = offset
            self._lay(offsets, offset, max(total, offset + self.sizes[i]))
            offsets[i] = -1
