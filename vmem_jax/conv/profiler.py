"""profiler: times a library's algorithms for convolutions in micro-batches, as far as needed.

Every algorithm is timed once for a device. The database is reused, and a micro-batch of 64 is the
same for all layers that differ only in their batch. For each size of micro-batch the result has the
algorithms that are faster than all with no more workspace; a fastest configuration needs no other.

Some algorithms take hundreds of times as long as the best one, seconds for a whole batch. A small
micro-batch shows which; they are skipped where another makes them useless. The others are timed by
expected time, so that a slow one meets the incumbent at once and is not run often (`conv/racing.py`).
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from vmem_jax.conv.database import Database, Entry
from vmem_jax.conv.sharing import share
from vmem_jax.core.convolution import Convolution, Micro
from vmem_jax.policy.workspace_division import desirable
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes

SECONDS = 90.0
"""How long profiling may take unless said otherwise: as long as the steps of a model may."""

_KEEP_EVERY = 10.0
"""Seconds after which the database is written, lest a crash of the library takes all along."""

_HOPELESS = 2.5
"""As many times as long as another of no more workspace, with another number of samples: it will not
be the faster one with this. The worst that was, of 21 kernels on an H200, had taken 1.8 times."""

_FAR_SLOWER = 30.0
"""As many times as long as one that may need more workspace. Such an algorithm serves where there is
hardly any, so only for whole batches, and nobody needs its time exactly: it is that of the fewer
samples, times as many as there are more."""

Progress = Callable[[int, int, str], None]
"""Called with how many convolutions of one size are done, of how many, and which one is next."""


class Plan(Protocol):
    """One algorithm of a library for a convolution, with its settings."""

    @property
    def engine(self) -> int: ...
    @property
    def knobs(self) -> Sequence[tuple[int, int]]: ...
    @property
    def workspace(self) -> int: ...
    @property
    def channels(self) -> int: ...


P = TypeVar("P", bound=Plan)


class Library(Protocol[P]):
    """A library of convolution algorithms. Both methods raise RuntimeError if they fail; `seconds`
    also if an algorithm that is faster than the incumbent computes wrong results."""

    def plans(self, convolution: Convolution) -> Sequence[P]:
        """All algorithms for the whole of `convolution` in one call; those likely fast first."""
        ...

    def seconds(self, convolution: Convolution, plan: P, incumbent: float) -> float:
        """What `plan` takes; nan where there is no device to time it on.

        The fastest algorithm known that needs no more workspace takes `incumbent` seconds, inf if
        there is none; how long a slower one takes nobody needs to know well.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Profile:
    """The result of profiling convolutions.

    Attributes:
      micros: for each convolution, the micro-configurations to choose from, all timed.
      timed: how many algorithms were timed now.
      reused: how many were timed before.
      untimed: "convolution: how many, and why" for algorithms that were skipped for other reasons.
      hopeless: how many algorithms were skipped because others make them useless.
      seconds: the seconds that profiling took.
    """

    micros: Mapping[Convolution, tuple[Micro, ...]]
    timed: int
    reused: int
    untimed: tuple[str, ...]
    seconds: float
    hopeless: int = 0


def profile(
    convolutions: Iterable[Convolution],
    sizes: BatchSizes,
    library: Library[P],
    database: Database,
    *,
    more: Sequence[Library[P]] = (),
    deadline: float = SECONDS,
    limit: int | None = None,
    refresh: bool = False,
    on_progress: Progress = lambda done, total, what: None,
) -> Profile:
    """Times the algorithms of `library` for `convolutions` that `database` lacks; adds them to it.

    Undivided batches come first, each after an eighth of it that shows which algorithms are hopeless,
    so that every convolution has a choice; then the other micro-batches. Within each group, those
    with the most operations come first.

    Args:
      more: the same library on further devices of the same kind, which share the work.
      deadline: seconds after which no further timing begins.
      limit: bytes; algorithms with a larger workspace are not timed.
      refresh: time everything again.
      on_progress: called before every convolution of one size, and at the end.
    """
    began = time.monotonic()
    is_up = lambda: time.monotonic() - began >= deadline
    distinct = dict.fromkeys(convolutions)
    parts = {c: [c.with_batch(b) for b in batch_sizes(c.batch, sizes)] for c in distinct}
    work = _ordered(parts)
    entries = {} if refresh else dict(database.load())
    reused = sum(len(entries[c].timed) for c in work if c in entries)
    work = [c for c in work if c not in entries or not entries[c].complete]
    timed = hopeless = ended = 0
    untimed: dict[Convolution, list[str]] = {}
    sizes_of: dict[Convolution, dict[Convolution, None]] = {}  # of what differs in the batch alone
    for part in (part for of_c in parts.values() for part in of_c):
        sizes_of.setdefault(part.with_batch(0), {})[part] = None
    new: dict[Convolution, Entry] = {}
    kept = began
    lock = threading.Lock()  # of all these

    def time_one(convolution: Convolution, library: Library[P]) -> None:
        nonlocal timed, hopeless, ended, new, kept
        with lock:
            if is_up():
                why = f"{convolution}: what was not known before: the time was up"
                untimed[convolution], ended = [why], ended + 1
                return
            on_progress(ended, len(work), str(convolution))
            known = entries.get(convolution, Entry(()))
            others = sizes_of[convolution.with_batch(0)]
            hints = [entries[c].timed for c in others if c != convolution and c in entries]
        hope = _Hope(convolution.batch, hints, divided=convolution not in parts)
        entry, count, untimed[convolution] = _time(convolution, library, known, limit, is_up, hope)
        with lock:
            new[convolution] = entries[convolution] = entry
            timed, hopeless, ended = timed + count, hopeless + hope.lost, ended + 1
            if time.monotonic() - kept > _KEEP_EVERY:
                database.keep(new)
                new, kept = {}, time.monotonic()

    try:
        share(work, [library, *more], time_one)
    finally:  # before an interruption, too, but for the convolution that it fell into
        if new:
            database.keep(new)
    on_progress(len(work), len(work), "")
    of = lambda c: entries[c].timed if c in entries else ()
    micros = {
        c: tuple(m for part in of_c for m in desirable(of(part))) for c, of_c in parts.items()
    }
    left = tuple(text for c in work for text in untimed.get(c, ()))
    return Profile(micros, timed, reused, left, time.monotonic() - began, hopeless)


def _ordered(parts: Mapping[Convolution, Sequence[Convolution]]) -> list[Convolution]:
    """What is to be timed, each once, in the order of its turn."""
    flops = lambda c: -c.flops
    first: dict[Convolution, None] = {}
    for whole in sorted(parts, key=flops):
        first |= dict.fromkeys((_scout(parts[whole]), whole))
    rest = {part for of_c in parts.values() for part in of_c} - first.keys()
    return [*first, *sorted(rest, key=lambda c: (flops(c), str(c)))]


def _scout(parts: Sequence[Convolution]) -> Convolution:
    """The size that is timed first: of so few samples that the worst algorithms do not take long."""
    most = max(part.batch for part in parts)
    return min(parts, key=lambda part: abs(part.batch - most / 8))


class _Hope:
    """Which algorithms are worth timing on `batch` samples, by their times on other numbers."""

    def __init__(self, batch: int, seen: Iterable[Sequence[Micro]], divided: bool) -> None:
        distance = lambda micros: abs(math.log(micros[0].batch / batch))
        nearest = sorted(filter(None, seen), key=distance)
        self._seen = [{m.algorithm: m for m in micros} for micros in nearest]
        self._divided = divided
        self.lost = 0

    def expected(self, micro: Micro) -> float:
        """Seconds that `micro` takes by the nearest size that it was seen with; inf where by none."""
        seen = self._nearest(micro).get(micro.algorithm)
        return math.inf if seen is None else seen.seconds * micro.batch / seen.batch

    def is_lost(self, micro: Micro, timed: Sequence[Micro]) -> bool:
        """Whether one that was `timed` makes `micro` useless; counted."""
        no_larger = [m for m in timed if m.workspace <= micro.workspace]
        lost = self._times_slower(micro, no_larger) > _HOPELESS
        lost |= self._divided and self._times_slower(micro, timed) > _FAR_SLOWER
        self.lost += lost
        return lost

    def seconds(self, micro: Micro, timed: Sequence[Micro]) -> float | None:
        """What `micro` takes by its samples, where that is too long to be seen; else None.

        None, too, where another was better in all with the nearest size: of that one only is it known
        that it is right (`Library.seconds`).
        """
        if self._times_slower(micro, timed) <= _FAR_SLOWER:
            return None
        was_desirable = micro.algorithm in {
            m.algorithm for m in desirable(self._nearest(micro).values())
        }
        return self.expected(micro) if was_desirable else None

    def _nearest(self, micro: Micro) -> Mapping[tuple[Any, ...], Micro]:
        """All of the nearest size that `micro` was seen with, by what does it; none where by none."""
        return next((seen for seen in self._seen if micro.algorithm in seen), {})

    def _times_slower(self, micro: Micro, others: Sequence[Micro]) -> float:
        """Than the fastest of `others`, with the nearest size that both were seen with."""
        for seen in self._seen:
            theirs = [seen[m.algorithm].seconds for m in others if m.algorithm in seen]
            if micro.algorithm in seen and theirs:
                return seen[micro.algorithm].seconds / min(theirs)
        return 0.0


def _time(
    convolution: Convolution,
    library: Library[P],
    known: Entry,
    limit: int | None,
    is_up: Callable[[], bool],
    hope: _Hope,
) -> tuple[Entry, int, list[str]]:
    """What is then known of `convolution`, how many algorithms were timed, and what was left out."""
    micros = {m.algorithm: m for m in known.timed}
    try:
        plans = library.plans(convolution)
    except RuntimeError as error:
        return known, 0, [f"{convolution}: all: {_reason(error)}"]
    if not plans:
        return known, 0, [f"{convolution}: the library has no algorithm for it"]
    count = 0
    left: dict[str, int] = {}
    pairs = [(micro_of(convolution.batch, plan), plan) for plan in plans]
    for micro, plan in sorted(pairs, key=lambda pair: hope.expected(pair[0])):
        if micro.algorithm in micros:
            continue
        timed = [m for m in micros.values() if not math.isnan(m.seconds)]
        why = ""
        if limit is not None and plan.workspace > limit:
            why = "the workspace is over the limit"
        elif is_up():
            why = "the time was up"
        elif not hope.is_lost(micro, timed):
            no_larger = (m.seconds for m in timed if m.workspace <= plan.workspace)
            incumbent = min(no_larger, default=math.inf)
            try:
                seconds = hope.seconds(micro, timed) or library.seconds(
                    convolution, plan, incumbent
                )
            except RuntimeError as error:
                why = _reason(error)
            else:
                why = "there is no device" if math.isnan(seconds) else ""
                micro = dataclasses.replace(micro, seconds=seconds)
                count += not why
        if why:
            left[why] = left.get(why, 0) + 1
        micros[micro.algorithm] = micro
    untimed = [f"{convolution}: {n} of {len(plans)}: {why}" for why, n in left.items()]
    return Entry(tuple(micros.values()), complete=not left), count, untimed


def micro_of(batch: int, plan: Plan) -> Micro:
    """A call of `plan` with `batch` samples, of which nothing is known but that it may run."""
    knobs = tuple(sorted(plan.knobs))
    return Micro(batch, plan.engine, knobs, plan.workspace, math.nan, plan.channels)


def _reason(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
