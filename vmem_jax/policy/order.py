"""The canonical order: every step where it keeps the fewest bytes alive. Free, and often a gain.

Two moves on the traced order, each taken only where it frees bytes:

- sink: a step, or a chain of them, whose results are larger than what it would keep alive goes just
  before its first use (residual-only work: an argmax, the cast of a weight; what the body of a
  backward loop computes again);
- hoist: a step in which more bytes die than it makes goes to where its last input is ready (a weight
  gradient as soon as its cotangent exists; an update as soon as its gradient exists), but an update
  never before the last read of the old value (a donated parameter is copied otherwise).

Of a program with hosted state the updates move as soon as they can also where that frees nothing by
itself, and with them the scalars that they wait for: what is streamed then comes and goes during the
backward pass, and not all at its end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Phase, Program
from vmem_jax.core.simulate import simulate
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.update_groups import update_ranks


def canonical_order(program: Program) -> tuple[int, ...]:
    """Returns the traced order with residual-only work sunk, freeing work hoisted, and the steps that
    update one weight together."""
    order = _hoist(program, _sink(program, list(range(len(program.steps)))))
    return ranked_order(program, update_ranks(program, order))


def lower_order(
    program: Program, costs: Costs, canonical: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """The canonical order or the traced one, whichever peaks lower; the canonical one if equal.

    `canonical`: `canonical_order(program)`, where the caller has it.
    """
    traced = tuple(range(len(program.steps)))
    orders = (canonical or canonical_order(program), traced)
    return min(orders, key=lambda order: simulate(program, order, costs).peak)


def ranked_order(program: Program, rank: Sequence[Any]) -> tuple[int, ...]:
    """The steps in ascending `rank`, each as soon as all that it must follow have run.

    A step follows the makers of what it reads, the readers of what it overwrites, and the effects
    that are traced before it.
    """
    after: list[set[int]] = [
        {m for b in step.reads if (m := program.producer[b]) >= 0} for step in program.steps
    ]
    for i, by in program.overwritten_by.items():
        after[by] |= {r for r in program.readers[i] if r != by}
    effects = [s for s, step in enumerate(program.steps) if not step.pure]
    for before, s in itertools.pairwise(effects):
        after[s].add(before)
    followers: list[list[int]] = [[] for _ in program.steps]
    for s, earlier in enumerate(after):
        for e in earlier:
            followers[e].append(s)
    waiting = [len(earlier) for earlier in after]
    ready = [(rank[s], s) for s, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, s = heapq.heappop(ready)
        order.append(s)
        for f in followers[s]:
            waiting[f] -= 1
            if not waiting[f]:
                heapq.heappush(ready, (rank[f], f))
    return tuple(order)


def _temporary(program: Program, buffers: tuple[int, ...]) -> list[int]:
    """Those of `buffers` that are on the device for a while."""
    return [b for b in buffers if not program.is_resident[b] or b in program.hosted]


def _sink(program: Program, order: list[int]) -> list[int]:
    """Moves steps down to their first use, last step first, so that whole chains move."""
    rank: dict[int, float] = {s: float(p) for p, s in enumerate(order)}
    for s in reversed(order):
        uses = [rank[r] for w in program.steps[s].writes for r in program.readers[w]]
        # a step that is already next to its first use stays: moving it would change nothing
        if uses and min(uses) - rank[s] > 1:
            first = min(uses)
            rank.update(dict.fromkeys(_sunk(program, rank, s, first), first - 0.5))
    return sorted(order, key=lambda s: (rank[s], s))


def _sunk(program: Program, rank: Mapping[int, float], s: int, first: float) -> Collection[int]:
    """Step `s`, or it and the makers of what it reads, where moving them to `first` in `rank` keeps
    fewer bytes alive until then; nothing where it does not.

    A chain may be of use where its last step is not: a rotation of queries is as large as they are,
    but with their product it leaves nothing but what the product reads. No value inside of a chain is
    larger than what it leaves: there may be less memory for it at `first`.
    """
    chain: set[int] = set()
    maker: int | None = s
    while maker is not None and _can_sink(program, rank, chain, maker, first):
        chain.add(maker)
        inside = lambda b: all(r in chain for r in program.readers[b])
        steps = [program.steps[each] for each in chain]
        made = {b for step in steps for b in step.writes}
        freed = sum(program.buffers[b].nbytes for b in made if not inside(b))
        largest = max((program.buffers[b].nbytes for b in made if inside(b)), default=0)
        held = {
            b: program.buffers[b].nbytes
            for step in steps
            for b in _temporary(program, step.reads)
            if b not in made
            and max((rank[r] for r in program.readers[b] if r not in chain), default=-1.0) < first
        }
        if freed > sum(held.values()) and freed >= largest:
            return chain
        # what the chain alone reads is not there before it if its maker moves, too
        makers = (program.producer[b] for b in sorted(held, key=lambda b: -held[b]) if inside(b))
        maker = next((m for m in makers if m >= 0), None)
    return ()


def _can_sink(
    program: Program, rank: Mapping[int, float], chain: Collection[int], s: int, first: float
) -> bool:
    """Whether step `s` may run at `first`, with `chain` behind it."""
    step = program.steps[s]
    if not step.pure or any(program.is_resident[w] for w in step.writes):
        return False
    overwritten = [program.overwritten_by.get(b) for b in step.reads]
    if any(rank[by] < first for by in overwritten if by is not None):
        return False
    readers = {r for w in step.writes for r in program.readers[w]}
    return all(rank[r] >= first for r in readers.difference(chain))


def _hoist(program: Program, order: list[int]) -> list[int]:
    """Moves steps up to where their last input is ready, first step first."""
    ordered = _Ordered()
    remaining = {b: len(readers) for b, readers in enumerate(program.readers)}
    final_reads = {
        by: [r for r in program.readers[i] if r != by] for i, by in program.overwritten_by.items()
    }
    last_effect: int | None = None
    boundary: int | None = None
    for s in order:
        step = program.steps[s]
        ahead = [m for b in step.reads if (m := program.producer[b]) >= 0]
        if not step.pure and last_effect is not None:
            ahead.append(last_effect)
        readers = final_reads.get(s, ())
        blocked = not all(r in ordered for r in readers)  # leave the copy to the compiler
        ahead += [r for r in readers if r in ordered]
        dying = sum(
            program.buffers[b].nbytes for b in _temporary(program, step.reads) if remaining[b] == 1
        )
        made = sum(program.buffers[w].nbytes for w in _temporary(program, step.writes))
        if boundary is not None:
            ahead.append(boundary)  # nothing leaves the loop over sub-batches
        scalars = bool(program.hosted) and step.pure and step.nbytes < PARAMS.scalar_nbytes
        update = bool(program.hosted) and step.phase is Phase.UPDATE and dying == made
        moves = (dying > made or update or scalars) and not blocked and not step.is_boundary
        ordered.insert(s, ahead if moves else None)
        if not step.pure:
            last_effect = s
        if step.is_boundary:
            boundary = s
        for b in step.reads:
            remaining[b] -= 1
    return ordered.in_order()


class _Ordered:
    """Steps in an order that grows, with a label each that rises along it.

    A label between two neighbours is halfway; where there is none left all are given anew.
    """

    _APART = 2**40

    def __init__(self) -> None:
        self._label: dict[int, int] = {}
        self._after: dict[int | None, int | None] = {None: None}  # the next one; of None the first
        self._last: int | None = None

    def __contains__(self, s: int) -> bool:
        return s in self._label

    def insert(self, s: int, ahead: Sequence[int] | None) -> None:
        """Puts `s` behind the last of `ahead`, in front if there is none; at the end for None."""
        before = self._last
        if ahead is not None:
            before = max(ahead, key=self._label.__getitem__, default=None)
        after = self._after[before]
        self._after[before], self._after[s] = s, after
        low = -1 if before is None else self._label[before]
        if after is None:
            self._last = s
            self._label[s] = low + self._APART
            return
        self._label[s] = (low + self._label[after]) // 2
        if self._label[s] == low:
            self._label = {each: (n + 1) * self._APART for n, each in enumerate(self.in_order())}

    def in_order(self) -> list[int]:
        found = []
        s = self._after[None]
        while s is not None:
            found.append(s)
            s = self._after[s]
        return found
