"""What `jit` keeps for one set of shapes: the step as traced, and as planned and proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vmem_jax.core.costs import Costs
from vmem_jax.core.tuning import Tuning
from vmem_jax.policy import AbstractPolicy
from vmem_jax.search.log import SearchLog
from vmem_jax.search.search import Attempt
from vmem_jax.tracing.traced import TracedStep


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step for one set of shapes: planned, compiled, proved.

    Attributes:
      traced: the form of the step that runs.
      budget: bytes that it was proved against; None for a given plan without a budget.
      plain_need: bytes that plain jit needs, where that was compiled.
      costs: what its plan was made from.
      attempts: every plan that was compiled; the last is the one that runs.
      policy: that planned it.
      log: what the search did.
      tuner: what runs it instead while its first calls are timed (`tune=True`).
      tuning: what that gave.
    """

    traced: TracedStep
    budget: int | None
    plain_need: int | None
    costs: Costs
    attempts: tuple[Attempt, ...]
    policy: AbstractPolicy
    log: SearchLog
    tuner: Callable[..., Any] | None = None
    tuning: Tuning | None = None

    @property
    def best(self) -> Attempt:
        return self.attempts[-1]
