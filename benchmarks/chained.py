"""Microseconds of a kernel, by programs that call it several times, one call behind the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def timed(
    call: Callable[..., Any],
    given: Sequence[Any],
    rounds: int,
    last: Callable[[Any], Any] = lambda made: made,
) -> tuple[float, Any]:
    """Microseconds of a call, of as many in one program as there are operands; and what `last` has of
    the first's result.

    Args:
      given: the operands of each call.
      rounds: runs of the program; the median counts.
      last: of a result what the next call waits for.
    """
    return compiled(call, given, rounds, last)()


def compiled(
    call: Callable[..., Any],
    given: Sequence[Any],
    rounds: int,
    last: Callable[[Any], Any] = lambda made: made,
) -> Callable[[], tuple[float, Any]]:
    """What gives the same, and has its program."""

    def run(given: Any) -> list[Any]:
        found: list[Any] = []
        for operands in given:
            if found:  # one behind the other
                operands, _ = jax.lax.optimization_barrier((operands, last(found[-1])))
            found.append(call(*operands))
        return found

    program = jax.jit(run).lower(given).compile()

    def time_it() -> tuple[float, Any]:
        first = jax.tree.map(np.asarray, last(program(given)[0]))
        seconds = []
        for _ in range(rounds):
            begun = time.perf_counter()
            jax.block_until_ready(program(given))
            seconds.append(time.perf_counter() - begun)
        return 1e6 * statistics.median(seconds) / len(given), first

    return time_it
