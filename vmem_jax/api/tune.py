"""tune: times the first calls of a step, and plans it once more where the prediction was off."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from vmem_jax.api.entry import CompiledStep
from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import simulate_plan
from vmem_jax.core.tuning import Tuning, agree
from vmem_jax.policy.base import Infeasible
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.search.attempt import Attempt
from vmem_jax.search.search import Search
from vmem_jax.search.variant import Family

WARM_UP = 2
"""Calls before the first that is timed: they pin memory, load libraries, raise clocks."""

TIMED = 3
"""Calls that are timed; the median counts."""

TOLERANCE = 0.05
"""Of the prediction: a difference up to this is no reason to plan again."""

_clock = time.perf_counter


class Tuner:
    """Runs an entry while its first calls are timed, then passes the final entry to `settle`, once.

    A timed call waits for its arguments before and for its results after. At most one other plan is
    made, and the plan that is measured to be faster stays. Errors of tuning are logged, and the
    first plan stays.
    """

    def __init__(
        self,
        name: str,
        entry: CompiledStep,
        replan: Callable[[CompiledStep, Costs], Attempt | None],
        settle: Callable[[CompiledStep], None],
    ) -> None:
        """Args: `replan`, another plan by other costs, or None; `settle`, takes the final entry."""
        self._name, self._entry, self._replan, self._settle = name, entry, replan, settle
        self._lock = threading.Lock()
        self._running = entry.best
        self._costs = entry.costs
        self._calls = 0
        self._times: list[float] = []
        self._first: Tuning | None = None  # of the first plan, while the other one runs
        self._done = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # While another thread's call is timed, this one runs beside it: neither waits for the other.
        if self._done or not self._lock.acquire(blocking=False):
            return self._running.compiled(*args, **kwargs)
        try:
            out = self._run(args, kwargs)
            if not self._done and len(self._times) == TIMED:
                self._conclude()
            return out
        finally:
            self._lock.release()

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            return self._timed(args, kwargs)
        except Exception as error:
            arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
            if self._first is None or any(x.is_deleted() for x in arrays):
                raise  # the first plan's own, or there is nothing left to run it on
            self._end(self._first, f"another plan failed: {_line(error)}")
            return self._running.compiled(*args, **kwargs)

    def _timed(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._running.compiled(*args, **kwargs)
        jax.block_until_ready((args, kwargs))
        began = _clock()
        out = jax.block_until_ready(self._running.compiled(*args, **kwargs))
        self._times.append(_clock() - began)
        return out

    def _conclude(self) -> None:
        measured = statistics.median(self._times)
        try:
            if self._first is not None:
                self._end(dataclasses.replace(self._first, other_measured=measured))
            else:
                self._judge(measured)
        except Exception as error:  # tuning is a favour: training goes on as it was
            logging.exception("%s: tuning failed", self._name)
            failed = self._first or Tuning(self._predicted(), measured)
            self._end(failed, f"planning again failed: {_line(error)}")

    def _predicted(self) -> float:
        plan = self._entry.best.plan
        program = self._entry.traced.captured.program
        return simulate_plan(program, plan, self._entry.costs).seconds

    def _judge(self, measured: float) -> None:
        """Ends, or goes on with another plan."""
        tuning = Tuning(self._predicted(), measured)
        logging.info("%s: %s", self._name, tuning)
        if abs(measured / tuning.predicted - 1) <= TOLERANCE:
            self._end(tuning)
            return
        program, plan = self._entry.traced.captured.program, self._entry.best.plan
        self._costs = agree(program, self._entry.costs, plan, measured)
        other = self._replan(self._entry, self._costs)
        if other is None:
            self._end(tuning, "no other plan is predicted to be faster")
            return
        self._first = dataclasses.replace(tuning, other_predicted=other.plan.predicted_seconds)
        self._running, self._calls, self._times = other, 0, []

    def _end(self, tuning: Tuning, note: str = "") -> None:
        tuning = dataclasses.replace(tuning, note=note)
        entry = dataclasses.replace(self._entry, tuner=None, tuning=tuning)
        if tuning.swapped:  # the first plan goes, and its host memory with it
            others = tuple(a for a in entry.attempts if a is not entry.best)
            attempts = (*(a for a in others if a is not self._running), self._running)
            entry = dataclasses.replace(entry, attempts=attempts, costs=self._costs)
        self._running, self._done = entry.best, True
        self._entry = entry
        logging.info("%s: %s", self._name, tuning)
        self._settle(entry)


def tuned(
    name: str,
    entry: CompiledStep,
    compile_plan: Callable[[Plan], Any],
    host_budget: int | None,
    settle: Callable[[CompiledStep], None],
) -> CompiledStep:
    """`entry` with a tuner, which passes the entry that replaces it to `settle`."""
    again = lambda entry, costs: replan(entry, costs, compile_plan, host_budget)
    return dataclasses.replace(entry, tuner=Tuner(name, entry, again, settle))


def replan(
    entry: CompiledStep,
    costs: Costs,
    compile_plan: Callable[[Plan], Any],
    host_budget: int | None,
) -> Attempt | None:
    """A compiled plan by the same policy with `costs`; None unless it differs and is faster.

    Args:
      compile_plan: for plans that no attempt of `entry` has.
      host_budget: for the host memory of both plans: while they are compared both have theirs.
    """
    program, now = entry.traced.captured.program, entry.best.plan
    seconds = simulate_plan(program, now, costs).seconds
    made = {now.schedule: entry.best.compiled}
    compiles = lambda plan: made.get(plan.schedule) or compile_plan(plan)
    variant = dataclasses.replace(entry.best.variant, costs=costs, compile_plan=compiles)
    first = variant.policy.plan(program, costs, entry.budget)
    if isinstance(first, Infeasible) or first.predicted_seconds >= seconds:
        return None
    found = Search(entry.budget).run([[Family((1,), lambda count: variant)]])
    best = found.best
    if not found.fits:  # by these costs the policy's plans all end too high
        return None
    if best.plan.schedule == now.schedule or best.plan.predicted_seconds >= seconds:
        return None
    # the variant must not hold the first plan's compiled step, which goes if this one is faster
    best = dataclasses.replace(best, variant=entry.best.variant)
    parked = sum(layout_of(program, p).nbytes for p in (now, best.plan) if p.moves)
    if host_budget is not None and parked > host_budget:
        logging.info("two plans would take %d bytes of host memory at once", parked)
        return None
    return best


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
