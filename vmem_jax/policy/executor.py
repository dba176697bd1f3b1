"""The executor: simulates an order and recomputes each value that is missing when it is read.

From the canonical order, a set of values to drop after given uses, and a limit, it makes an order
with the recomputed steps in place. The steps that a value needs are found backwards to what is live,
run in program order, and leave their results for the next use (speed-centric). At the limit it drops
the value
with the lowest cost per byte and second of absence: the heuristic of DTR (Kirisame et al., ICLR 2021,
section 3.1: h = cost / (memory × staleness)), with the time until the known next use (Belady's rule)
in place of staleness. On a chain of n layers this gives √n memory for about one extra forward pass. A
value that is parked in host memory instead returns at its next use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Program
from vmem_jax.policy.eviction import Evictions
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.recomputation import Drop, Recomputation


@dataclasses.dataclass(frozen=True, slots=True)
class Away:
    """A buffer that no step of an order touches from position `since` to before position `until`."""

    buffer: int
    since: int
    until: int


class Execution:
    """One run of the executor over `base`; `order` is the result.

    Args:
      drops: pairs (buffer, use after which it is freed).
      limit: bytes; None for no limit.
      parks: pairs (buffer, use after which it waits in host memory).
      forget: buffers that a recomputation does not leave for later uses (memory-centric).

    Attributes:
      order: steps in execution order, recomputed ones in place.
      away: the parked buffers, with their positions in `order`.
      fits: whether the limit held at every step, by the executor's own count.
    """

    def __init__(
        self,
        program: Program,
        costs: Costs,
        base: Sequence[int],
        drops: Collection[Drop] = (),
        limit: int | None = None,
        recomputation: Recomputation | None = None,
        parks: Collection[Drop] = (),
        forget: Collection[int] = (),
    ) -> None:
        self._program = program
        self._forget = frozenset(forget)
        self._costs = costs
        self._drops = drops if isinstance(drops, set | frozenset) else frozenset(drops)
        self._parks = parks if isinstance(parks, set | frozenset) else frozenset(parks)
        self._leaving = {b for some in (self._drops, self._parks) for b, _ in some}
        self._absent: set[int] = set()  # what was there and is not
        self._parked: dict[int, int] = {}  # buffer -> position of the order since which it is away
        self._unread: dict[int, Away] = {}  # what came back and was not read since
        self.away: list[Away] = []
        self._limit = limit
        self._base = base
        self._recomputation = recomputation or Recomputation(program, base)
        self._uses = self._recomputation.uses
        self._next = [0] * len(program.buffers)  # index into _uses: the next use still to come
        self._present = list(program.is_resident)
        for b in program.inputs:
            self._present[b] = True
        self._live: dict[int, int] = {}  # with how many came before
        self._came = 0
        self._evictions: Evictions | None = None
        self._nbytes = program.resident_nbytes
        self.order: list[int] = []
        self.fits = True
        self._most = PARAMS.longest_order * len(base) + 1000
        self._now = 0
        for self._now, s in enumerate(base):
            self._run_base(s)

    # -- one step of the base order

    def _run_base(self, s: int) -> None:
        step = self._program.steps[s]
        if not self._absent.isdisjoint(step.reads):
            self._bring(step.reads)
            missing = [b for b in step.reads if not self._present[b]]
            if missing:
                self._recompute(missing, step.reads)
        self._emit(s, step.reads)
        for b in self._recomputation.touched[s]:
            following = self._next[b] = self._next[b] + 1
            if self._evictions is not None:
                self._evictions.used(b)
            if following >= len(self._uses[b]):
                if b not in self._recomputation.pinned:
                    self._free(b)
            elif b in self._leaving:
                self._leave(b, following)

    def _leave(self, b: int, following: int) -> None:
        """`b`, of which the use before its `following` one has passed, is gone now if it is to be."""
        if (b, following - 1) in self._parks:
            self._free(b)
            self._parked[b] = len(self.order)
        elif (b, following - 1) in self._drops:
            if self._recomputation.may_drop(b, self._uses[b][following]):
                self._free(b)

    def _bring(self, buffers: Sequence[int]) -> None:
        """Those of `buffers` that are parked are there again."""
        for b in buffers:
            if b in self._parked:
                self._unread[b] = Away(b, self._parked.pop(b), len(self.order))
                self.away.append(self._unread[b])
                self._hold(b)

    def _evict(self, b: int) -> None:
        """Frees `b` before its next use. What was parked and is not read since stays parked."""
        self._free(b)
        away = self._take_back(b)
        if away is not None:
            self._parked[b] = away.since

    def _take_back(self, b: int) -> Away | None:
        """Undoes the return of `b` from host memory, if nothing has read it since."""
        away = self._unread.pop(b, None)
        if away is not None:
            self.away.remove(away)
        return away

    # -- recomputation

    def _recompute(self, wanted: Sequence[int], pinned: Collection[int]) -> None:
        """Makes `wanted` present by running their producers, inputs first."""
        program = self._program
        steps: set[int] = set()
        stack = list(wanted)
        while stack:
            b = stack.pop()
            s = program.producer[b]
            if s not in steps:
                steps.add(s)
                self._bring(program.steps[s].reads)
                stack += [r for r in program.steps[s].reads if not self._present[r]]
        pending: dict[int, int] = {}  # reads of a temporary still to come in this burst
        for s in steps:
            for r in program.steps[s].reads:
                pending[r] = pending.get(r, 0) + 1
        held = {*pinned, *wanted}
        for s in sorted(steps):
            step = program.steps[s]
            self._bring(step.reads)
            gone = [r for r in step.reads if not self._present[r]]
            pins = held | set(step.reads)
            if gone:  # evicted during this burst, to stay below the limit
                self._recompute(gone, pins)
            self._emit(s, pins)
            for r in step.reads:
                pending[r] -= 1
                if not pending[r]:
                    self._free_unneeded(r, held)
            for w in step.writes:
                if not pending.get(w):
                    self._free_unneeded(w, held)

    def _free_unneeded(self, b: int, held: set[int]) -> None:
        """Frees what a burst made for itself: nothing in the base order reads it any more."""
        done = self._next[b] >= len(self._uses[b]) or self._next[b] == 0
        if b in self._recomputation.pinned:
            return
        if (done or b in self._forget) and b not in held and not self._program.is_resident[b]:
            self._free(b)

    # -- memory

    def _emit(self, s: int, pinned: Collection[int]) -> None:
        program = self._program
        step = program.steps[s]
        fresh = [w for w in step.writes if not program.is_resident[w] and w not in self._live]
        if self._limit is not None:
            if len(self.order) > self._most:
                self._limit, self.fits = None, False  # finish the order, over the limit
            need = sum(program.buffers[w].nbytes for w in fresh) + step.workspace
            need -= self._reused(s, fresh)
            while self._limit is not None and self._nbytes + need > self._limit:
                evicted = self._evicted({*pinned, *step.writes})
                if evicted is None:
                    self.fits = False
                    break
                self._evict(evicted)
        for w in step.writes:  # made again beside another, it need not come back
            self._parked.pop(w, None)
            self._take_back(w)
        for w in fresh:
            self._hold(w)
        for b in step.reads:
            self._unread.pop(b, None)
        self.order.append(s)

    def _reused(self, s: int, fresh: list[int]) -> int:
        """Bytes that `s` writes over what it reads last."""
        for r, w in self._program.steps[s].in_place:
            last = self._next[r] + 1 >= len(self._uses[r])
            if last and w in fresh and r in self._live:
                return self._program.buffers[w].nbytes
        return 0

    def _hold(self, b: int) -> None:
        self._live[b] = self._came
        self._came += 1
        self._present[b] = True
        self._absent.discard(b)
        self._nbytes += self._program.buffers[b].nbytes
        if self._evictions is not None:
            self._evictions.came(b)

    def _free(self, b: int) -> None:
        if b in self._live:
            del self._live[b]
            self._present[b] = False
            self._absent.add(b)
            self._nbytes -= self._program.buffers[b].nbytes
            if self._evictions is not None:
                self._evictions.went(b)

    def _evicted(self, pinned: set[int]) -> int | None:
        if self._evictions is None:  # from here on it is informed of changes
            self._evictions = Evictions(
                self._program,
                self._costs,
                self._recomputation,
                self._live,
                self._present,
                self._next,
                len(self._base),
            )
        return self._evictions.lowest(self._now, pinned)
