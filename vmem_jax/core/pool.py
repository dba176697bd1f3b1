"""pool: simulates one pool of device memory that serves a schedule, and its fragmentation.

Source: Shriram et al., "Dynamic Memory Management for GPU-based Training of Deep Neural Networks"
(vDNN++), IPDPS 2019, sections III-B and IV-B. Nothing moves within the pool, so a request can fail
although enough bytes are free in total. Two placement heuristics and two orders of requests are
simulated, since the best one differs from step to step.

XLA allocates device memory by itself. The figures here are those of a pool like the paper's.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence

from vmem_jax.core.liveness import taken_over
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import Program
from vmem_jax.core.schedule import Do, actions


class Heuristic(enum.StrEnum):
    """The placement of a request in the pool.

    BEST_FIT: the lower end of the smallest free block that holds it.
    HIGH_END: the highest free address for tensors that will be offloaded; others as BEST_FIT.
    """

    BEST_FIT = "best-fit"
    HIGH_END = "high-end"


@dataclasses.dataclass(frozen=True, slots=True)
class Allocate:
    """A request for `nbytes`, to be freed by its key; `offloaded` if it leaves for the host later."""

    key: int
    nbytes: int
    offloaded: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """The end of what was allocated under `key`."""

    key: int


Request = Allocate | Free


@dataclasses.dataclass(frozen=True, slots=True)
class Unserved:
    """The request that a pool could not serve, and the largest block that was free then, in bytes."""

    request: Allocate
    largest: int


def aggregate_nbytes(requests: Iterable[Request]) -> int:
    """The most bytes that are allocated at once; no pool is smaller."""
    sizes: dict[int, int] = {}
    now = most = 0
    for request in requests:
        if isinstance(request, Allocate):
            sizes[request.key] = request.nbytes
            now += request.nbytes
            most = max(most, now)
        else:
            now -= sizes.pop(request.key)
    return most


def serve(
    requests: Iterable[Request], nbytes: int, heuristic: Heuristic
) -> dict[int, int] | Unserved:
    """Offsets by key in a pool of `nbytes`, or what could not be served."""
    free = [(0, nbytes)] if nbytes else []  # (offset, bytes) by offset, never two side by side
    used: dict[int, tuple[int, int]] = {}
    offsets: dict[int, int] = {}
    for request in requests:
        if isinstance(request, Free):
            _give_back(free, *used.pop(request.key))
            continue
        fitting = [block for block in free if block[1] >= request.nbytes]
        if not fitting:
            return Unserved(request, max((n for _, n in free), default=0))
        high = heuristic is Heuristic.HIGH_END and request.offloaded
        block = max(fitting) if high else min(fitting, key=lambda block: (block[1], block[0]))
        at = free.index(block)
        rest = block[1] - request.nbytes
        offset = block[0] + rest if high else block[0]
        left = (block[0] if high else block[0] + request.nbytes, rest)
        free[at : at + 1] = [left] if rest else []
        used[request.key] = offset, request.nbytes
        offsets[request.key] = offset
    return offsets


def _give_back(free: list[tuple[int, int]], offset: int, nbytes: int) -> None:
    at = bisect.bisect(free, (offset, 0))
    if at < len(free) and free[at][0] == offset + nbytes:
        nbytes += free.pop(at)[1]
    if at and sum(free[at - 1]) == offset:
        offset, before = free.pop(at - 1)
        nbytes, at = nbytes + before, at - 1
    if nbytes:
        free.insert(at, (offset, nbytes))


def smallest_pool(requests: Sequence[Request], heuristic: Heuristic) -> int:
    """Bytes of about the smallest pool that serves all of `requests` (IV-B).

    The pool starts at the most bytes allocated at once, and grows by what the largest free block
    lacked for the request that failed. A smaller pool may also work, since the heuristics are not
    monotonic.
    """
    nbytes = aggregate_nbytes(requests)
    while isinstance(failed := serve(requests, nbytes, heuristic), Unserved):
        nbytes += failed.request.nbytes - failed.largest
    return nbytes


def requests_of(
    program: Program,
    order: Sequence[int],
    transfers: Sequence[Transfer] = (),
    prefetch_first: bool = True,
) -> list[Request]:
    """The requests of `order` to a pool; arguments and outputs lie elsewhere.

    Args:
      prefetch_first: whether buffers that are fetched before a step are allocated before those that
        the step writes (its derivatives), or after them.
    """
    moved = {t.buffer for t in transfers}
    key: dict[int, int] = {}  # of the block that a live buffer has
    made: list[Request] = []
    count = 0

    def allocate(b: int, nbytes: int, offloaded: bool = False) -> None:
        nonlocal count
        key[b] = count
        made.append(Allocate(count, nbytes, offloaded))
        count += 1

    waiting: list[int] = []  # what is fetched before the next step, if that comes after its writes
    for event in actions(program, order, transfers):
        ours = [b for b in event.buffers if b not in program.hosted]
        if event.do is Do.GONE:
            made += [Free(key.pop(b)) for b in ours if b not in waiting]
            waiting = [b for b in waiting if b not in ours]
        elif event.do is Do.FETCH and prefetch_first:
            for b in ours:
                allocate(b, program.buffers[b].nbytes)
        elif event.do is Do.FETCH:
            waiting += ours
        elif event.do is Do.FREE:
            made += [Free(key.pop(b)) for b in ours if b in key]
        elif event.do is Do.RUN:
            step = program.steps[event.index]
            for r, w in taken_over(program, step, event.buffers).items():
                if r in key and w not in key:
                    key[w] = key.pop(r)
            for w in step.writes:
                if not program.is_resident[w] and w not in key:
                    allocate(w, program.buffers[w].nbytes, w in moved)
            for b in waiting:
                allocate(b, program.buffers[b].nbytes)
            waiting = []
            if step.workspace:
                made += [Allocate(count, step.workspace), Free(count)]
                count += 1
    return made


@dataclasses.dataclass(frozen=True)
class Fragmentation:
    """The bytes of temporaries that a schedule needs, and those of pools that serve it.

    Attributes:
      aggregate: the most bytes live at once.
      pools: (whether prefetches come first, heuristic) -> bytes, as in the paper's Table V.
    """

    aggregate: int
    pools: Mapping[tuple[bool, Heuristic], int]

    @property
    def nbytes(self) -> int:
        """Of the smallest of the pools."""
        return min(self.pools.values())


def fragmentation(
    program: Program, order: Sequence[int], transfers: Sequence[Transfer] = ()
) -> Fragmentation:
    """The pools that serve `order` with each heuristic and order of requests."""
    pools: dict[tuple[bool, Heuristic], int] = {}
    aggregate = 0
    for prefetch_first in (True, False):
        requests = requests_of(program, order, transfers, prefetch_first)
        aggregate = max(aggregate, aggregate_nbytes(requests))
        for heuristic in Heuristic:
            pools[prefetch_first, heuristic] = smallest_pool(requests, heuristic)
    return Fragmentation(aggregate, pools)
