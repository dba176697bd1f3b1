"""tensor_cache: what a tensor cache in front of the host memory of a plan saves, before it runs.

Wang et al., "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks", PPoPP
2018, section 3.3.2: of what a step moves, device memory that is left over holds what was used most
recently. The native extension does the same when the step runs (docs/ffi.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from vmem_jax.core.looped import EXTRA
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program
from vmem_jax.core.schedule import POINTS, Do, actions

Event = tuple[int, int, int]
"""(index of a point in `POINTS`, slot, entry of the slot)."""

Key = tuple[int, int]
"""(slot, entry of the slot)."""

Interval = tuple[int, int]
"""The first byte, and the first behind it."""


class Slot(Protocol):
    """A slot in host memory: entries of `nbytes` bytes each, `stride` bytes apart."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def stride(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What one step does with a cache of `capacity` bytes; all sizes in bytes.

    Attributes:
      hits, misses: fetches from the cache, and over the link.
      out, into: over the link, to the host and back.
    """

    capacity: int
    hits: int
    misses: int
    out: int
    into: int


def events_of(program: Program, plan: Plan) -> Iterator[Event]:
    """The points of what `plan` parks, in the order in which a step reaches them.

    Slots are numbered as in the layout of the host memory: first the transfers of buffers that the
    caller does not host, then the looped stacks. What moves within a sub-batch does so in each.
    """
    moving = [i for i, t in enumerate(plan.transfers) if t.buffer not in program.hosted]
    slots = {i: slot for slot, i in enumerate(moving)}
    writers: dict[int, list[Key]] = {}  # step -> (slot, entries) of its stacks
    readers: dict[int, list[Key]] = {}
    for slot, b in enumerate(plan.looped, len(moving)):
        own = slot, program.buffers[b].slices + EXTRA
        writers.setdefault(program.producer[b], []).append(own)
        readers.setdefault(program.readers[b][0], []).append(own)
    whole: list[Event] = []
    first = last = None
    for action in actions(program, plan.order, plan.transfers):
        if action.do in POINTS and action.index in slots:
            whole.append((POINTS.index(action.do), slots[action.index], 0))
        if action.do is not Do.RUN:
            continue
        s = action.index
        whole += [(point, *key) for key in _entries(writers.get(s, ())) for point in (0, 1)]
        whole += [(point, *key) for key in _entries(readers.get(s, ()))[::-1] for point in (2, 3)]
        if program.steps[s].is_boundary:
            first, last = (len(whole) if first is None else first), len(whole)
    if first is None or last is None:
        yield from whole
        return
    yield from whole[:first]
    for _ in range(plan.sub_batches):
        yield from whole[first:last]
    yield from whole[last:]


def _entries(stacks: Sequence[Key]) -> list[Key]:
    """The entries of stacks, each given with their number, as a loop pushes them."""
    deepest = max((depth for _, depth in stacks), default=0)
    return [(slot, entry) for entry in range(deepest) for slot, depth in stacks if entry < depth]


def traffic(events: Iterable[Event], slots: Sequence[Slot], capacity: int) -> Traffic:
    """What `events` come to with a cache of `capacity` bytes that is empty at first.

    A tensor goes into the cache if there is room once the least recently used of those that no copy
    uses have left; a copy uses a tensor from its start to `gone`, and from its fetch on. XLA may
    exchange points before the same step, which changes what of them goes through the cache.
    """
    held: dict[Key, Interval] = {}  # by slot and entry, the oldest first
    locked: set[Key] = set()
    hits = misses = out = into = 0
    for point, number, entry in events:
        key, slot = (number, entry), slots[number]
        if point == 0:
            idle = [k for k in held if k not in locked]
            preferred = slot.offset + entry * slot.stride
            fits = _fit(held, idle, capacity, slot.stride, preferred)
            if fits is None:
                out += slot.nbytes
                continue
            begin, leaving = fits
            for victim in idle[:leaving]:
                del held[victim]
                out += slots[victim[0]].nbytes
            held[key] = begin, begin + slot.stride
            locked.add(key)
        elif point == 1:
            locked.discard(key)
        elif point == 2:
            locked.add(key)
            hits += key in held
            misses += key not in held
            into += 0 if key in held else slot.nbytes
        else:
            locked.discard(key)
            held.pop(key, None)
    return Traffic(capacity, hits, misses, out, into)


def _fit(
    held: Mapping[Key, Interval], idle: Sequence[Key], capacity: int, nbytes: int, preferred: int
) -> tuple[int, int] | None:
    """The offset for `nbytes`, and how many of `idle` have to leave for it; None if there is none.

    At the offset in host memory where that is free, so that a cache of its size never evicts; else
    in the tightest gap.
    """
    if nbytes > capacity:
        return None
    for leaving in range(len(idle) + 1):
        gone = set(idle[:leaving])
        used = sorted(at for key, at in held.items() if key not in gone)
        ends = [0, *(end for _, end in used)]
        begins = [*(begin for begin, _ in used), capacity]
        gaps = [(e, b) for e, b in zip(ends, begins, strict=True) if b - e >= nbytes]
        if any(e <= preferred and preferred + nbytes <= b for e, b in gaps):
            return preferred, leaving
        if gaps:
            return min(gaps, key=lambda gap: (gap[1] - gap[0], gap))[0], leaving
    return None
