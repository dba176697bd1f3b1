"""Arena: host memory for parked tensors, one for each executable, pinned on each of its devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from vmem_jax.errors import HostMemoryError
from vmem_jax.transfer import host_memory
from vmem_jax.transfer.extension import as_dataclass, handler_device, load
from vmem_jax.transfer.layout import Layout
from vmem_jax.transfer.registered import Registered


@dataclasses.dataclass(frozen=True, slots=True)
class Counters:
    """Counts of an arena on one device since it was pinned there. Sizes are in bytes.

    Attributes:
      hits: fetches from the tensor cache, without the link.
      misses: fetches that crossed the link.
      evictions: tensors that left the cache for the arena.
      link_nbytes_out: device to host, evictions included.
      link_nbytes_in: host to device.
      recopies: offloads that were repeated because XLA had moved the value meanwhile.
      resets: how often the leftovers of a failed run were dropped.
      parked: the current number of tensors between `offload_start` and `fetch_done`.
      cache_nbytes: the capacity of the cache.
      cache_used_nbytes: the current use of the cache.
      arena_nbytes: the pinned size of the arena.
    """

    hits: int
    misses: int
    evictions: int
    link_nbytes_out: int
    link_nbytes_in: int
    recopies: int
    resets: int
    parked: int
    cache_nbytes: int
    cache_used_nbytes: int
    arena_nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """One recorded copy on a lane, or one recorded wait of the compute stream for a copy.

    Attributes:
      waits: whether it is a wait.
      out: whether the copy goes to the host (evictions included) or to the device.
      link: whether it uses the link, or copies between the tensor cache and XLA's buffer.
      run: XLA's number of the execution.
      slot: the slot in the arena's layout.
      nbytes: the bytes of its tensor.
      begin, end: seconds of `time.monotonic()`.
    """

    waits: bool
    out: bool
    link: bool
    run: int
    slot: int
    nbytes: int
    begin: float
    end: float


class Arena(Registered):
    """Host memory of `layout.nbytes` on every device that it is pinned for.

    Pin it once, before the first run.

    Attributes:
      layout: its slots.
    """

    def __init__(self, layout: Layout, *, host_budget: int | None = None) -> None:
        """Registers `layout`; pins nothing yet.

        Args:
          layout: from a plan.
          host_budget: the most host memory, in bytes, of all devices together.
        """
        extension = load()
        self.layout = layout
        self._host_budget = host_budget
        slots = [
            extension.SlotLayout(offset=s.offset, nbytes=s.nbytes, stride=s.stride, depth=s.depth)
            for s in layout.slots
        ]
        super().__init__(extension.arena_create(slots, layout.nbytes), extension.arena_free)

    def pin(self, device: jax.Device, *, lock_pages: bool = False) -> None:
        """Allocates and pins the arena for `device`, unless that has been done.

        Args:
          device: a CPU or CUDA device of this process.
          lock_pages: on the CPU, where nothing needs pinned memory, keep it from being swapped all
            the same. CUDA's is always pinned.

        Raises:
          HostMemoryError: there is too little memory, or it may not be pinned; nothing is allocated.
        """
        where = handler_device(device)
        if where in self._ready:
            return
        nbytes = self.layout.nbytes
        budget = self._host_budget
        if budget is not None:
            budget -= len(self._ready) * nbytes
        on_cpu = where[0] == "cpu"
        host_memory.check(nbytes, lock_pages=lock_pages and on_cpu, host_budget=budget)
        try:
            load().arena_pin(self.id, *where, lock_pages)
        except MemoryError as error:
            limits = host_memory.limits(lock_pages=True, host_budget=budget)
            tightest = min(limits, key=lambda limit: limit.nbytes)
            raise HostMemoryError(
                nbytes=nbytes, limit_nbytes=tightest.nbytes, limit=f"{tightest.name}; {error}"
            ) from error
        self._ready.add(where)

    def set_cache_capacity(self, device: jax.Device, nbytes: int) -> None:
        """Gives the arena `nbytes` of device memory as a tensor cache, between two runs.

        Tensors that fit stay on the device; parking and fetching them are copies within it. When the
        cache is full, the least recently used tensors that no copy uses move to the arena. On a GPU
        the memory is outside of XLA's own pool. SuperNeurons, section 3.3.2.

        Raises:
          RuntimeError: a run holds the arena.
          MemoryError: the device has too little memory left.
        """
        if nbytes < 0:
            raise ValueError(f"`nbytes` must not be negative. Got {nbytes}.")
        load().cache_set_capacity(self.id, *handler_device(device), nbytes)

    @contextlib.contextmanager
    def record(self, device: jax.Device) -> Iterator[list[Moved]]:
        """Times every copy and wait on `device` in a `with` block; the list is complete at its end.

        The streams record the times themselves, so nothing waits for them before the end of the
        block. On a GPU the device's clock is tied to the host's within some microseconds.

        Raises:
          RuntimeError: a run holds the arena where the block begins or ends, or it is not pinned.
        """
        extension, where = load(), handler_device(device)
        moved: list[Moved] = []
        extension.record(self.id, *where, True)
        try:
            yield moved
            moved += [as_dataclass(Moved, span) for span in extension.spans(self.id, *where)]
        finally:
            extension.record(self.id, *where, False)

    def reset(self, device: jax.Device) -> None:
        """Drops what failed runs have left parked on `device`. No run may be in flight there.

        The next run does so by itself, but it cannot tell a run that failed elsewhere, in another
        custom call, from one that takes its time, and waits for it.

        Raises:
          RuntimeError: it is not pinned there.
        """
        load().arena_reset(self.id, *handler_device(device))

    def counters(self, device: jax.Device) -> Counters:
        """The counts of `device` so far; operations that were started count."""
        return as_dataclass(Counters, load().counters(self.id, *handler_device(device)))


def live_arenas() -> int:
    """How many arenas this process has that are not freed."""
    return load().arena_count()
