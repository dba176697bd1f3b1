"""merging: recomputed elementwise steps that XLA would merge with a later one, at the cost of memory.

XLA:GPU fuses an elementwise step into the elementwise step that reads it, or makes one kernel with
two results of both, unless what lies in between leads from one to the other. In a run of
recomputation nothing does between two residual joins, if the convolutions of the second branch are
made of what is kept. The merged kernel runs where the second step stood, and what the first one would
have freed lives until then.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence

from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline
from vmem_jax.core.spines import is_read_from


class Merging:
    """What XLA merges in the runs of an order.

    Args:
      timeline: of the order, each step as it stands there.
      again: for each position whether its step ran before.
      uses: as `spines.uses_of` has them.
      small: values up to this many bytes do not matter.
    """

    near = 0.8
    """The share of the peak, without residents, up to which a merged kernel may hold more: XLA's heap
    may need more than what is live at once, and a barrier costs another read."""

    def __init__(
        self,
        program: Program,
        timeline: Timeline,
        again: Sequence[bool],
        uses: Mapping[int, Sequence[tuple[int, bool]]],
        small: int,
    ) -> None:
        self.program, self.order, self.uses = program, timeline.order, uses
        resident = program.resident_nbytes
        self.small, self.most = small, resident + self.near * (timeline.peak - resident)
        self.live = list(timeline.live_nbytes)
        self.recomputed = [p for p, ran in enumerate(again) if ran]

    def held(self, starts: Sequence[int]) -> dict[int, int]:
        """Where a barrier over the result of an elementwise step must stand, in front of the first
        recomputation behind it, so that no merged kernel raises the peak: position -> result.

        Args:
          starts: where runs begin: nothing is merged across.
        """
        runs = itertools.pairwise([*starts, len(self.order)])
        return {p: b for start, end in runs for p, b in self._held_in(start, end)}

    def _held_in(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        made: dict[int, int] = {}  # result of an elementwise step -> its position
        frees: dict[int, int] = {}  # the bytes that are free when it is made
        for position in range(start, end):
            step = self.program.steps[self.order[position]]
            if not step.fusible:
                continue
            later = 0
            for b in step.reads:
                first = self._recomputed_from(made.get(b, position) + 1)
                if first > position or self._leads_to(b, made[b] + 1, position):
                    continue
                if self._raises_peak(b, frees[b], made[b] + 1, position):
                    yield first, b
                else:
                    later += frees[b]
            here = later + sum(self._nbytes(b) for b in step.reads if self._dies(b, position))
            for b in step.writes:
                if self._nbytes(b) > self.small:
                    made[b], frees[b] = position, here

    def _recomputed_from(self, position: int) -> int:
        """The first recomputation at `position` or behind it; the end of the order without one."""
        at = bisect.bisect_left(self.recomputed, position)
        return self.recomputed[at] if at < len(self.recomputed) else len(self.order)

    def _raises_peak(self, b: int, frees: int, first: int, last: int) -> bool:
        """Whether making `b` at `last`, not before `first`, takes too much; notes what it takes if it
        does not. `frees` bytes live until then, and `b` does not exist."""
        more, before = frees - self._nbytes(b), self.live[first : last + 1]
        live = [nbytes + more for nbytes in before[:-1]]
        live.append(before[-1] + (more if self._dies(b, last) else frees))
        if (
            max((now for now, was in zip(live, before, strict=True) if now > was), default=0)
            > self.most
        ):
            return True
        self.live[first : last + 1] = live
        return False

    def _leads_to(self, b: int, first: int, last: int) -> bool:
        """Whether a library's kernel from `first` on hangs on `b`, and what `last` reads on that."""
        steps, hanging, behind = self.program.steps, {b}, set[int]()
        for s in self.order[first:last]:
            if not behind.isdisjoint(steps[s].reads):
                behind.update(steps[s].writes)
            elif not hanging.isdisjoint(steps[s].reads):
                (hanging if steps[s].fusible else behind).update(steps[s].writes)
        return not behind.isdisjoint(steps[self.order[last]].reads)

    def _nbytes(self, b: int) -> int:
        return self.program.buffers[b].nbytes

    def _dies(self, b: int, position: int) -> bool:
        return not self.program.is_resident[b] and not is_read_from(self.uses[b], position + 1)
