"""tune: times the first calls of a step, and those of other plans that may be faster."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from absl import logging

from vmem_jax.api.entry import CompiledStep
from vmem_jax.api.rivals import Rival, predicted_seconds
from vmem_jax.core.tuning import Timed, Tuning
from vmem_jax.search.attempt import Attempt

WARM_UP = 2
"""Calls before the first that is timed: they pin memory, load libraries, raise clocks."""

TIMED = 3
"""Calls that are timed; the median counts."""

MOST_RIVALS = 4
"""Plans that are timed beside the first one: each takes a compile and five calls."""

_clock = time.perf_counter

Rivals = Callable[[float, Callable[[], Attempt]], Iterator[Rival]]
"""(measured seconds of the first plan, the fastest plan so far) -> other plans. Each is made when the
one before was timed."""

Settle = Callable[[CompiledStep, Sequence[tuple[Attempt, float]]], None]
"""Takes the final entry, and the plans that ran with their measured seconds."""


class Tuner:
    """Runs an entry while its first calls are timed, then passes the final entry to `settle`, once.

    A timed call waits for its arguments before and for its results after. The plan that is measured
    to be the fastest stays. Errors of tuning are logged, and training goes on.
    """

    def __init__(self, name: str, entry: CompiledStep, rivals: Rivals, settle: Settle) -> None:
        self._name, self._entry, self._settle = name, entry, settle
        self._make_rivals = rivals
        self._rivals: Iterator[Rival] | None = None
        self._lock = threading.Lock()
        self._running = Rival("the first plan", entry.best)
        self._ran: list[tuple[Attempt, Timed]] = []
        self._failed: list[Timed] = []
        self._calls = 0
        self._times: list[float] = []
        self._done = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # While another thread's call is timed, this one runs beside it: neither waits for the other.
        if self._done or not self._lock.acquire(blocking=False):
            return self._running.attempt.compiled(*args, **kwargs)
        try:
            out = self._run(args, kwargs)
            if not self._done and len(self._times) == TIMED:
                self._conclude(statistics.median(self._times))
            return out
        finally:
            self._lock.release()

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            return self._timed(args, kwargs)
        except Exception as error:
            arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
            if not self._ran or any(x.is_deleted() for x in arrays):
                raise  # the first plan's own, or there is nothing left to run it on
            running = self._running
            why = f"it failed: {_line(error)}"
            self._failed.append(Timed(running.what, predicted_seconds(running.attempt), None, why))
            self._go_on()
            return self._fastest().compiled(*args, **kwargs)

    def _timed(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        compiled = self._running.attempt.compiled
        if self._calls <= WARM_UP:
            return compiled(*args, **kwargs)
        jax.block_until_ready((args, kwargs))
        began = _clock()
        out = jax.block_until_ready(compiled(*args, **kwargs))
        self._times.append(_clock() - began)
        return out

    def _fastest(self) -> Attempt:
        return min(self._ran, key=lambda one: one[1].measured or 0.0)[0]

    def _conclude(self, measured: float) -> None:
        """Notes what the running plan takes, and goes on."""
        what, attempt = self._running
        timed = Timed(what, predicted_seconds(attempt), measured)
        logging.info("%s: %s", self._name, timed)
        self._ran.append((attempt, timed))
        fastest = self._fastest()  # the others' compiled steps go, and their host memory with them
        keep = lambda one: one if one is fastest else dataclasses.replace(one, compiled=None)
        self._ran = [(keep(one), timed) for one, timed in self._ran]
        self._go_on()

    def _go_on(self) -> None:
        """Runs another plan from the next call on, or ends."""
        self._calls, self._times = 0, []
        try:
            if self._rivals is None:
                [(_, first)] = self._ran
                self._rivals = self._make_rivals(first.measured or 0.0, self._fastest)
            tried = len(self._ran) - 1 + len(self._failed)
            rival = next(self._rivals, None) if tried < MOST_RIVALS else None
        except Exception as error:  # tuning is a favour: training goes on as it was
            logging.exception("%s: tuning failed", self._name)
            self._end(f"planning again failed: {_line(error)}")
            return
        if rival is None:
            self._end("" if self._failed or len(self._ran) > 1 else "no other plan may be faster")
        else:
            self._running = rival

    def _end(self, note: str) -> None:
        [(_, first), *others] = self._ran
        tuning = Tuning(first, (*(timed for _, timed in others), *self._failed), note)
        best = self._fastest()
        attempts = (*(a for a in self._entry.attempts[:-1]), *(a for a, _ in self._ran))
        traced = dataclasses.replace(best.variant.origin, plain=self._entry.traced.plain)
        entry = dataclasses.replace(
            self._entry,
            traced=traced,
            costs=best.costs,
            policy=best.variant.policy,
            attempts=(*(a for a in attempts if a is not best), best),
            rivals=(),
            tuner=None,
            tuning=tuning,
        )
        ran = [(attempt, timed.measured or 0.0) for attempt, timed in self._ran]
        self._running, self._done, self._rivals = Rival("", best), True, None
        self._entry = entry
        logging.info("%s: %s", self._name, tuning)
        self._settle(entry, ran)


def tuned(name: str, entry: CompiledStep, rivals: Rivals, settle: Settle) -> CompiledStep:
    """`entry` with a tuner, which passes the entry that replaces it to `settle`."""
    return dataclasses.replace(entry, tuner=Tuner(name, entry, rivals, settle))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
