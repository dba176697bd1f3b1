"""recomputation: which values can be recomputed, and between which of their uses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vmem_jax.core.program import Program
from vmem_jax.policy.params import PARAMS

Drop = tuple[int, int]
"""(buffer, n): dropped after its n-th use in the base order, n = 0 for the write."""


class Recomputation:
    """Which values may be dropped: those whose producer can run again from what is live or can itself
    be recomputed.

    Attributes:
      program, base: the program, and the order of all first runs.
      uses: for every buffer, the positions in the base order that write or read it.
      pinned: small values that are made of nothing, such as the key of a generator. They stay live
        from their write to the end, since a compiler merges a second producer with the first. What is
        made of them may be recomputed.
      touched: for every step, its reads and writes without arguments and outputs.
    """

    def __init__(self, program: Program, base: Sequence[int]) -> None:
        self.program, self.base = program, base
        rank = {s: p for p, s in enumerate(base)}
        self._gone_after = {i: rank[by] for i, by in program.overwritten_by.items()}
        self.uses: list[list[int]] = [[] for _ in program.buffers]
        for position, s in enumerate(base):
            for b in (*program.steps[s].reads, *program.steps[s].writes):
                self.uses[b].append(position)
        resident = program.is_resident
        self.touched = [
            tuple(b for b in (*step.reads, *step.writes) if not resident[b])
            for step in program.steps
        ]
        self.pinned = frozenset(
            w
            for step in program.steps
            if step.pure and not step.reads
            for w in step.writes
            if program.buffers[w].nbytes <= PARAMS.pinned_nbytes and not resident[w]
        )
        self._known: dict[tuple[int, int], bool] = {}

    def idle(self) -> list[Drop]:
        """Every interval between two uses that are not neighbours, of what may be made again."""
        program = self.program
        return [
            (b, n)
            for b, uses in enumerate(self.uses)
            if not program.is_resident[b] and program.buffers[b].nbytes > 0
            for n, (use, following) in enumerate(itertools.pairwise(uses))
            if following - use > 1 and self.may_drop(b, following)
        ]

    def may_drop(self, b: int, need: int, depth: int = 0) -> bool:
        """Whether `b` can be made again before position `need` of the base order.

        Its producer is pure, reads something, and each of its reads is a resident that is not yet
        overwritten, a value that the base order still uses at `need` or later (which is kept, or
        dropped by this very rule), or may be made again itself.
        """
        key = (b, need)
        if key not in self._known:
            self._known[key] = depth < PARAMS.deepest_recompute and self._decide(b, need, depth)
        return self._known[key]

    def _decide(self, b: int, need: int, depth: int) -> bool:
        program = self.program
        s = program.producer[b]
        if s < 0 or not program.steps[s].pure or not program.steps[s].reads:
            return False
        for r in program.steps[s].reads:
            if program.is_resident[r]:
                if self._gone_after.get(r, need) < need:
                    return False
            elif r in self.pinned or self.uses[r][-1] >= need:
                continue
            elif not self.may_drop(r, need, depth + 1):
                return False
        return True
