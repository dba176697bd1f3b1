"""paired: one iteration of a forward loop and of the backward loop that reads its residuals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

from vmem_jax.core.program import Program


@dataclasses.dataclass(frozen=True)
class PairedLoop:
    """Two loops of which the second reads in every iteration what the first made in the same one.

    Attributes:
      program: one iteration of both, one behind the other, with nothing stacked.
      length: iterations.
      given: inputs that the second loop can read without a stack: arguments of every iteration,
        slices of stacks that are there anyway.
      carried: inputs that the first loop carries into the iteration; it can stack them.
      late: inputs that only the second loop has: cotangents.
      made: values that the first loop has to make, whatever is kept.
      returned: results of the second loop.
      carries: of every value of `carried` what it is in the next iteration: a buffer of this one, or
        −1 for a constant.
      times: how often both loops run, in a loop around them.
    """

    program: Program
    length: int
    given: frozenset[int]
    carried: frozenset[int]
    late: frozenset[int]
    made: frozenset[int]
    returned: frozenset[int]
    carries: tuple[tuple[int, int], ...] = ()
    times: int = 1

    @functools.cached_property
    def late_steps(self) -> frozenset[int]:
        """The steps that depend on what only the second loop has, and so run there."""
        late, found = set(self.late), set[int]()
        for s, step in enumerate(self.program.steps):
            if not late.isdisjoint(step.reads):
                found.add(s)
                late.update(step.writes)
        return frozenset(found)

    @functools.cached_property
    def keepable(self) -> frozenset[int]:
        """The values that the first loop can stack."""
        steps = [s for s in range(len(self.program.steps)) if s not in self.late_steps]
        return self.carried | {b for s in steps for b in self.program.steps[s].writes}

    @functools.cached_property
    def copied(self) -> frozenset[int]:
        """Those of `keepable` that are copied to their stacks: what a library makes, what is carried
        in, and what the first loop reads, too. A fused kernel writes any other result there."""
        by, steps = self.program.producer, self.program.steps
        used = {b for s in self.first_steps for b in steps[s].reads}
        direct = lambda b: by[b] >= 0 and steps[by[b]].fusible and b not in used
        return frozenset(b for b in self.keepable if not direct(b))

    @functools.cached_property
    def copied_out(self) -> frozenset[int]:
        """The values that a library reads in the second loop: a slice of a stack is copied for it."""
        steps = self.program.steps
        return frozenset(b for s in self.late_steps if not steps[s].fusible for b in steps[s].reads)

    @functools.cached_property
    def fused(self) -> frozenset[int]:
        """The values that the first loop computes within the kernels that read them: where they are
        stacked, a kernel makes them."""
        program = self.program

        def has_no_kernel(s: int, b: int) -> bool:
            readers = {r for r in program.readers[b] if r in self.first_steps}
            steps = [program.steps[r] for r in (s, *readers)]
            return bool(readers) and b not in self.made and all(step.fusible for step in steps)

        pairs = ((s, b) for s in self.first_steps for b in program.steps[s].writes)
        return frozenset(b for s, b in pairs if has_no_kernel(s, b))

    @functools.cached_property
    def wanted(self) -> frozenset[int]:
        """The values that the second loop needs and that do not depend on what only it has."""
        program = self.program
        early = lambda b: b not in self.late and program.producer[b] not in self.late_steps
        read = {b for s in self.late_steps for b in program.steps[s].reads}
        return frozenset(filter(early, (read | self.returned) - self.given))

    @functools.cached_property
    def first_steps(self) -> frozenset[int]:
        """The steps that the first loop has to run for what it makes, and those that only it may."""
        program = self.program
        early = [s for s in range(len(program.steps)) if s not in self.late_steps]
        needed, found = set(self.made), set[int]()
        for s in reversed(early):
            step = program.steps[s]
            if not step.pure or not needed.isdisjoint(step.writes):
                found.add(s)
                needed.update(step.reads)
        return frozenset(found)


@dataclasses.dataclass(frozen=True)
class EqualSegments:
    """`count` segments of `every` iterations, from iteration `at` on, each divided by `deeper`."""

    at: int
    count: int
    every: int
    deeper: Division


@dataclasses.dataclass(frozen=True)
class DivisionCounts:
    """What the seconds and the bytes of a division grow with; see `Division` for each."""

    again: int
    last: int
    carry_ins: int
    carry_ins_at_once: int
    slices: int

    @staticmethod
    def least(counts: Collection[DivisionCounts]) -> DivisionCounts:
        """The least of each: whatever is chosen takes no more seconds or bytes with these."""
        each = zip(*map(dataclasses.astuple, counts), strict=True)
        return DivisionCounts(*map(min, each))


@dataclasses.dataclass(frozen=True)
class Division:
    """`length` iterations in segments of `every[0]`, each of these in segments of `every[1]`, and so
    on. What a segment carries in is kept until it has run backwards; then it is run again.

    The last segment of each level has as many iterations as the others or fewer. It is not run again,
    but divided by the next length, until `last` iterations are behind all segments.
    """

    length: int
    every: tuple[int, ...]

    @functools.cached_property
    def levels(self) -> tuple[EqualSegments, ...]:
        """The segments in the order in which they run; no level without any."""
        found, at = [], 0
        for i, every in enumerate(self.every):
            count = -(-(self.length - at) // every) - 1
            if count > 0:
                found.append(EqualSegments(at, count, every, Division(every, self.every[i + 1 :])))
                at += count * every
        return tuple(found)

    @property
    def last(self) -> int:
        """Iterations behind all segments: at least one."""
        return self.length - sum(level.count * level.every for level in self.levels)

    @functools.cached_property
    def again(self) -> int:
        """How many iterations run again, in all."""
        return sum(level.count * (level.every + level.deeper.again) for level in self.levels)

    @functools.cached_property
    def carry_ins(self) -> int:
        """How often what a segment carries in is kept, in all."""
        return sum(level.count * (1 + level.deeper.carry_ins) for level in self.levels)

    @functools.cached_property
    def carry_ins_at_once(self) -> int:
        """The most of them that exist at a time."""
        before, most = 0, 0
        for level in self.levels:
            before += level.count
            most = max(most, before + level.deeper.carry_ins_at_once)
        return most

    @property
    def slices(self) -> int:
        """How many slices a stack for one innermost segment has; 0 where nothing is divided."""
        return min(self.every, default=0)

    @property
    def counts(self) -> DivisionCounts:
        """What its seconds and bytes grow with."""
        both = self.carry_ins, self.carry_ins_at_once
        return DivisionCounts(self.again, self.last, *both, self.slices)
