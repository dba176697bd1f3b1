"""segment_lengths: how long the segments of divided loops are, and on how many levels.

Each choice of lengths is a program of its own (`policy.residuals`). But what is the best to keep with
some lengths most often is with others, too, and what it takes there is known without HiGHS. So few
programs are solved: first those whose relaxations take the least, none whose relaxation cannot be
better, and after each the one of the lengths that suit its choice best, until none is better. The
relaxation with the least of what all lengths count is one for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from vmem_jax.core.costs import Machine
from vmem_jax.core.paired import DivisionCounts, PairedLoop
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.residuals import Kept, Stacks, counts_of

Lengths = tuple[tuple[int, ...], ...]
"""Of each loop the lengths of its segments on each level, outermost first; () where it has none."""


class Divided:
    """The choices for `loops` that may be divided into segments, of whatever lengths are the best.
    What was found within some bytes, and that nothing better was, is known within fewer."""

    def __init__(self, loops: Sequence[PairedLoop], machine: Machine) -> None:
        most = max((_levels(loop.length) for loop in loops), default=0)
        self._levels = [_Level(loops, machine, levels) for levels in range(most + 1)]

    def within(self, limit: int | None = None) -> Kept | None:
        """The fastest choice whose stacks are within `limit` bytes, None for no limit; None where
        there is none. A further level is looked at where the one before is of use, or nothing fits.
        """
        goal, best = _Goal(limit, fewest=False), None
        for level in self._levels:
            best = goal.better(level.found, best)
        for levels, level in enumerate(self._levels):
            found = level.best(goal, best)
            if levels and found is not None and found is best:
                break
            best = found
        return None if best is None else best.kept

    def by_levels(self) -> Iterator[Kept]:
        """The choice with the fewest bytes, and of those the fastest, with one more level of segments
        after another. Ends where a level is not of use."""
        goal, best = _Goal(None, fewest=True), None
        for level in self._levels:
            found = level.best(goal, best)
            if found is None or found is best:
                return
            yield found.kept
            best = found


@dataclasses.dataclass(frozen=True, eq=False)
class _Found:
    """A choice, as the variables that are taken, with some lengths; its seconds and bytes."""

    model: Stacks
    every: Lengths
    taken: np.ndarray
    seconds: float
    nbytes: int

    @property
    def kept(self) -> Kept:
        return self.model.kept(self.taken, self.every)


@dataclasses.dataclass(frozen=True)
class _Goal:
    """The fewest seconds within `limit` bytes, or the fewest bytes."""

    limit: int | None
    fewest: bool

    def below(self, best: _Found | None) -> float:
        """The seconds, or bytes, below which something is better than `best`."""
        if best is None:
            return math.inf
        return best.nbytes if self.fewest else (1 - PARAMS.division_gap) * best.seconds

    def better(self, found: Sequence[_Found], best: _Found | None) -> _Found | None:
        """The best of `found`, or `best` where that is not better."""
        value = lambda each: (each.nbytes, each.seconds) if self.fewest else (each.seconds,)
        fit = (each for each in found if self.limit is None or each.nbytes <= self.limit)
        first = min(fit, key=value, default=None)
        return best if first is None or value(first)[0] >= self.below(best) else first

    def least(self, model: Stacks) -> float:
        return model.least(self.limit, self.fewest)

    def solve(self, model: Stacks, best: _Found | None) -> np.ndarray | None:
        return model.solve(self.limit, self.fewest, math.inf if self.fewest else self.below(best))


class _Level:
    """The programs with so many levels of segments, and the choices that were `found`."""

    def __init__(self, loops: Sequence[PairedLoop], machine: Machine, levels: int) -> None:
        self.lengths = divisions(loops, levels) if levels else (((),) * len(loops),)
        self.counts = [counts_of(loops, every) for every in self.lengths]
        self.model_of = functools.partial(Stacks, loops, machine)
        self.found: list[_Found] = []
        # (bytes, seconds): within so many bytes nothing that takes fewer seconds was found
        self.sought: list[tuple[float, float]] = []

    @functools.cached_property
    def models(self) -> list[Stacks]:
        """For each of `lengths`; they differ in seconds and bytes alone."""
        return [self.model_of(counts) for counts in self.counts]

    def best(self, goal: _Goal, best: _Found | None) -> _Found | None:
        """The best choice, or `best` where none is better."""
        best = goal.better(self.found, best)
        limit = math.inf if goal.limit is None else goal.limit
        slower = [seconds for most, seconds in self.sought if most >= limit]
        if not goal.fewest and max(slower, default=0.0) >= goal.below(best):
            return best
        best = self._sought(goal, best)
        if not goal.fewest:
            self.sought.append((limit, goal.below(best)))
        return best

    def _sought(self, goal: _Goal, best: _Found | None) -> _Found | None:
        least = [0.0]
        if len(self.lengths) > 1:
            together = [
                None if None in each else DivisionCounts.least(each)
                for each in zip(*self.counts, strict=True)
            ]
            if goal.least(self.model_of(together)) >= goal.below(best):
                return best
            least = [*map(goal.least, self.models)]
        tried, misses = set[int](), 0
        for start in sorted(range(len(least)), key=least.__getitem__):
            enough = misses == PARAMS.division_misses and not goal.fewest
            if enough or least[start] >= goal.below(best):
                break
            at = start
            while at not in tried:
                tried.add(at)
                taken = goal.solve(self.models[at], best)
                found = goal.better(self._with(taken), best)
                if found is None or found is best:
                    misses += 1
                    break
                best, misses, at = found, 0, self.lengths.index(found.every)
        return best

    def _with(self, taken: np.ndarray | None) -> list[_Found]:
        """The choice with each of `lengths`."""
        if taken is None:
            return []
        pairs = zip(self.models, self.lengths, strict=True)
        found = [_Found(model, every, taken, *model.cost(taken)) for model, every in pairs]
        self.found += found
        return found


def divisions(loops: Sequence[PairedLoop], levels: int = 1) -> tuple[Lengths, ...]:
    """Lengths of segments on so many levels, of each loop outermost first, () of one that is too
    short.

    Innermost segments have from 2 iterations to half of them, where there are several loops each
    with the same multiple of the length that stores the fewest slices. From there outwards lengths
    are multiples, near a geometric series up to the loop's own: with these the fewest carry-ins exist
    at a time.
    """
    octaves = PARAMS.segment_octaves
    most = octaves * max((loop.length for loop in loops), default=0).bit_length()
    shares = [2 ** (step / octaves) for step in range(-most, most + 1)]
    every = (tuple(_lengths(loop.length, levels, share) for loop in loops) for share in shares)
    return tuple(each for each in dict.fromkeys(every) if any(each))


def _levels(length: int) -> int:
    """The most levels of segments that are of use."""
    if length < PARAMS.shortest_loop:
        return 0
    fewest = lambda levels: (levels + 1) * length ** (1 / (levels + 1)) - levels
    levels = 1
    while fewest(levels + 1) <= PARAMS.level_share * fewest(levels):
        levels += 1
    return levels


def _lengths(length: int, levels: int, share: float) -> tuple[int, ...]:
    """The lengths of segments on so many levels or the most that are of use, outermost first."""
    levels = min(levels, _levels(length))
    if not levels:
        return ()
    last = min(max(round(share * length ** (1 / (levels + 1))), 2), -(-length // 2**levels))
    ratio = max(round((length / last) ** (1 / levels)), 2)
    every = (last * ratio**level for level in range(levels - 1, -1, -1))
    return tuple(each for each in every if each < length)
