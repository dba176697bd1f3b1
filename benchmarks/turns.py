"""Variants that take turns with plain jit in one process: a few at a time, until a time is up.

A timing is a ratio of medians in one process. So plain jit, the reference, is in every *heat*: a few
variants that are compiled and warmed up, take turns block by block, and then make room for the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import logging
from locks import held
from variants import Variant, initial_states

from vmem_jax.models import Job

PINNED = 32 * 2**30
"""Bytes of pinned host memory with which a heat is full: a machine has some 100 GiB."""

WARM_UP = 2
"""Steps before the timed ones; the first pins host memory and loads kernels."""


@dataclasses.dataclass(frozen=True)
class Pace:
    """How much is timed.

    Attributes:
      rounds: blocks of each variant.
      steps: in a block.
      together: variants in a heat, plain jit not counted; 0 for all.
      seconds: for all heats, from when the process began its work; 0 for no limit.
      limit: seconds for one variant to be planned, compiled and warmed up; 0 for no limit.
      lock: a file, see `locks`, that processes share which time at one time.
    """

    rounds: int
    steps: int
    together: int = 0
    seconds: float = 0.0
    limit: float = 0.0
    lock: str = ""


class TimeUp(BaseException):
    """The time is up. No Exception, since what a variant fails with is a row and this is not."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeUp in the block after so long: in Python code, or when what it called returns."""
    if math.isinf(seconds):
        yield
        return

    def end(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, end)
    signal.siginterrupt(signal.SIGALRM, False)  # compilers need not know of it
    # every 5 s again, since a finaliser swallows what is raised in it
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def too_slow(way: str, limit: float) -> Variant:
    """The variant of `way`, which had not run once when its seconds were over."""
    name, _, asked = way.partition("@")
    made = Variant(name, None, asked, lambda: (None, {}))
    made.outcome = records.time_limit(limit)
    return made


class Turns:
    """The heats of one train step."""

    def __init__(self, work: Job, pace: Pace, began: float) -> None:
        """Args: `began`, of `time.monotonic()`, is where `pace.seconds` count from."""
        self.pace = pace
        self.end = began + pace.seconds if pace.seconds else math.inf
        self._draw = initial_states(work)
        self._batch = jax.block_until_ready(jax.jit(work.random_batch)(jax.random.key(1)))

    def heats(
        self, plain: Variant | None, ways: Sequence[str], make: Callable[[str], list[Variant]]
    ) -> Iterator[list[Variant]]:
        """Variants that took their turns, heat by heat; they are freed when the next is asked for.

        Args:
          plain: the reference, compiled; None for none.
          ways: what to make variants of, in this order; those for which no time is left are logged.
          make: compiles those of one way; none where there is nothing to run.
        """
        waiting = deque(ways)
        reference = [] if plain is None else [plain]
        while True:
            for variant in reference:
                self._warm_up(variant)
            some: list[Variant] = []
            while waiting and not self._is_full(some):
                limit = self.pace.limit or math.inf
                try:
                    with held(self.pace.lock, alone=False):
                        left = self._left([*reference, *some])
                        with at_most(min(left, limit)):
                            made = make(waiting[0])
                            for variant in made:
                                self._warm_up(variant)
                except TimeUp:
                    # a second alarm, while the first unwound what it met, leaves the timer on
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    if left <= limit:
                        logging.warning("no time is left for %s", ", ".join(waiting))
                        waiting.clear()
                        break
                    made = [too_slow(waiting[0], limit)]
                waiting.popleft()
                some += made
            with held(self.pace.lock, alone=True):
                self._take_turns(reference, some)
            yield some
            for variant in some:
                variant.run = variant.state = None
            del some
            gc.collect()  # pinned host memory is freed with the executable
            if not waiting:
                return

    def _is_full(self, some: Sequence[Variant]) -> bool:
        running = [v for v in some if v.run is not None]
        pinned = sum(v.facts.get("pinned_nbytes") or 0 for v in running)
        return 0 < self.pace.together <= len(running) or pinned >= PINNED

    def _left(self, running: Sequence[Variant]) -> float:
        """Seconds until `running` must begin their turns."""
        turns = sum(v.warm_seconds for v in running) * self.pace.rounds * self.pace.steps
        return self.end - time.monotonic() - turns

    def _warm_up(self, variant: Variant) -> None:
        """Gives it a state and runs its first steps, which may be where it fails.

        Every variant keeps its own state while others run, so that nothing is copied between
        blocks: parameters of these networks take 0.3 to 2 GiB, of a card's 100 and more.
        """
        if variant.run is None:
            return
        variant.state = self._draw()
        for _ in range(WARM_UP):
            variant.time(self._batch, 1, keep=False)
        if variant.run is None and "RESOURCE_EXHAUSTED" not in variant.outcome:
            jax.block_until_ready(jnp.zeros(()) + 1)  # a broken device would fail all others, too

    def _take_turns(self, reference: Sequence[Variant], some: Sequence[Variant]) -> None:
        if not any(v.run for v in some) and any(v.seconds for v in reference):
            return  # nothing to compare it with
        before = [len(v.seconds) for v in reference]
        for done in range(self.pace.rounds):
            if done and time.monotonic() > self.end:
                logging.warning("the time is up after %d rounds of %d", done, self.pace.rounds)
                break
            for variant in (*reference, *some):
                variant.time(self._batch, self.pace.steps, keep=True)
        for variant, first in zip(reference, before, strict=True):
            if blocks := variant.seconds[first:]:
                variant.plain_seconds = statistics.median(variant.seconds)
                for each in some:
                    if each.seconds:
                        each.compare(statistics.median(blocks), variant.loss)
