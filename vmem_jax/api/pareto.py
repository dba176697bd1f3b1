"""pareto: what a step takes, in seconds, for every number of bytes that it may need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vmem_jax.api.jit import BudgetedStep, jit
from vmem_jax.api.planner import PARAMS, checked_log, find_plan
from vmem_jax.api.sweep import point_of, sweep
from vmem_jax.core.pareto_point import ParetoPoint
from vmem_jax.search.attempt import Compiles, Found, Record
from vmem_jax.techniques import StepContext

UNLIMITED = 2**62
"""Bytes that anything fits."""

_COMPILES = 4
"""Plans that one of the searches compiles; each knows what the others compiled."""


def pareto(
    fun: Callable,
    *args: Any,
    target: str | None = None,
    points: int = 8,
    compile: bool = True,
    **options: Any,
) -> list[ParetoPoint]:
    """The trade of seconds against bytes for `fun(*args)`; nothing runs.

    The step is traced once. Up to `points` searches share its forms, their bounds and every plan
    that was compiled, and go where the trade is steep. Later calls of the step with such a budget
    know what was compiled here.

    Args:
      fun: a step that `jit` returned, whose settings hold but for its budget; or a training step as
        `jit` takes it.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      target: a card that is not there, "h200".
      points: searches, at least 2. Each compiles up to four plans, most of them one or two.
      compile: whether plans are compiled. Without, peaks and budgets are predictions, and it takes
        the time of planning alone.
      options: those of `jit` but `budget`, for a training step.

    Returns:
      Points from the smallest budget; each is faster than all before it.

    Raises:
      TypeError: `options` has a budget or a plan, or goes with a step of `jit`.
      ValueError: `points` is less than 2.
      VmemError: the step cannot be planned with these options at all.
    """
    if points < 2:
        raise ValueError(f"`points` must be at least 2, for both ends. Got {points}.")
    for name in ("budget", "plan", "tune"):
        if name in options:
            raise TypeError(f"`pareto` is about all budgets, so it takes no `{name}`.")
    if isinstance(fun, BudgetedStep):
        if options:
            raise TypeError(f"`fun` has its settings, so `pareto` takes no {[*options]}.")
        step = fun
    else:
        step = jit(fun, budget=UNLIMITED, **options)
    return points_of(step.context(args, {}, target), points, compile)


def points_of(step: StepContext, points: int, compile: bool) -> list[ParetoPoint]:
    """The points of a traced step, as `pareto` gives them."""
    settings = dataclasses.replace(step.settings, plan=None)
    step = StepContext(settings, step.traced, step.leaves, step.target, step.inlined)
    params = dataclasses.replace(PARAMS, max_compiles=_COMPILES, reserved_compiles=1)
    record = None if compile else Record()  # of all searches, and of no other
    compiles = Compiles.UNTRIED if compile else Compiles.NONE

    def find(budget: int) -> Found:
        log = checked_log(step)
        return find_plan(step, budget, log, params=params, record=record, compiles=compiles)

    return [point_of(attempt, compile) for attempt in sweep(find, UNLIMITED, points)]


__all__ = ["UNLIMITED", "ParetoPoint", "pareto", "points_of"]
