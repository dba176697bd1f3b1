"""lowest: the minimum peak of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vmem_jax.api.jit import jit
from vmem_jax.core.plan import Plan
from vmem_jax.errors import BudgetError


class Lowest(NamedTuple):
    """The minimum peak of a step.

    Attributes:
      nbytes: bytes that the compiled step needs; `jit(budget=nbytes)` meets it.
      plan: the plan that reaches it, for `jit(plan=plan)`.
      seconds: the predicted seconds of that plan.
    """

    nbytes: int
    plan: Plan
    seconds: float


def lowest(fun: Callable, *args: Any, target: str | None = None, **options: Any) -> Lowest:
    """The minimum peak of `fun(*args)`, found and compiled; nothing runs.

    Args:
      fun: a training step, or any function, as `jit` takes it.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      target: a card that is not there, "h200".
      options: those of `jit` but `budget`: `policy`, `allow`, `donate_argnums`, ...

    Raises:
      TypeError: `options` has a budget or a plan.
      VmemError: the step cannot be planned with these options at all.
    """
    for name in ("budget", "plan", "tune"):
        if name in options:
            raise TypeError(f"`lowest` looks for the minimum peak, so it takes no `{name}`.")
    try:
        plan = jit(fun, budget=1, **options).plan(*args, target=target)
    except BudgetError as error:
        if not isinstance(error.lowest_plan, Plan):
            raise
        return Lowest(error.lowest_peak, error.lowest_plan, error.lowest_plan.predicted_seconds)
    return Lowest(plan.predicted_peak, plan, plan.predicted_seconds)  # it needs no memory at all
