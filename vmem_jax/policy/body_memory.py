"""body_memory: what one iteration of a backward loop holds beside its stacks.

Its steps run in their canonical order, each value that is computed again just before its first use.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection

from vmem_jax.core.paired import PairedLoop
from vmem_jax.policy.order import canonical_order


@dataclasses.dataclass(frozen=True)
class BodyMemory:
    """The backward iteration of `loop`; a position is one of the steps that only it can run."""

    loop: PairedLoop

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The steps that only it can run."""
        late = self.loop.late_steps
        return tuple(s for s in canonical_order(self.loop.program) if s in late)

    @functools.cached_property
    def reads(self) -> dict[int, tuple[int, int]]:
        """The first and the last position that reads each value of the forward iteration."""
        return self._spans(lambda b: b not in self._late)

    @functools.cached_property
    def base(self) -> tuple[int, ...]:
        """For each position the bytes that are live whatever is kept."""
        program = self.loop.program
        live = [program.steps[s].workspace for s in self.order]
        reads = self._spans(self._late.__contains__)
        for at, s in enumerate(self.order):
            for b in program.steps[s].writes:
                for t in range(at, reads.get(b, (at, at))[1] + 1):
                    live[t] += program.buffers[b].nbytes
        return tuple(live)

    @functools.cached_property
    def _late(self) -> frozenset[int]:
        steps = self.loop.program.steps
        return frozenset(b for s in self.loop.late_steps for b in steps[s].writes) | self.loop.late

    def _spans(self, of: Callable[[int], bool]) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for at, s in enumerate(self.order):
            for b in self.loop.program.steps[s].reads:
                if of(b):
                    found[b] = found.get(b, (at, at))[0], at
        return found

    def held(self, kept: Collection[int]) -> tuple[int, ...]:
        """For each position the live bytes where `kept` is read from stacks."""
        program, given = self.loop.program, self.loop.given
        there = {*kept, *given}
        first: dict[int, int] = {}  # step that runs again -> position
        for b, (at, _) in sorted(self.reads.items(), key=lambda item: item[1]):
            waiting = [b]
            while waiting:
                b = waiting.pop()
                s = program.producer[b]
                if b not in there and s >= 0 and s not in first:
                    first[s] = at
                    waiting += program.steps[s].reads
        live = [*self.base]
        for s, at in first.items():
            for b in program.steps[s].writes:
                if b in there:
                    continue
                last = self.reads.get(b, (at, -1))[1]
                last = max([last, *(first[r] - 1 for r in program.readers[b] if r in first)])
                for t in range(at, last + 1):
                    live[t] += program.buffers[b].nbytes
        return tuple(live)
