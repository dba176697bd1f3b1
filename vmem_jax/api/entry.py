"""The entry that `jit` caches for one set of shapes: the step as traced, planned and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Program
from vmem_jax.core.tensor_cache import Traffic
from vmem_jax.core.tuning import Tuning
from vmem_jax.policy import AbstractPolicy
from vmem_jax.search.attempt import Attempt
from vmem_jax.search.log import SearchLog
from vmem_jax.search.variant import Variant
from vmem_jax.tracing.traced import TracedStep
from vmem_jax.transfer.transport import AbstractTransport


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step for one set of shapes, planned and compiled within its budget.

    Attributes:
      traced: the form of the step that runs.
      budget: bytes; None for a given plan without a budget.
      plain_need: bytes that plain jit needs; None if plain jit was not compiled.
      costs: the predicted seconds that the plan was made from.
      attempts: every plan that was compiled; the last one runs.
      policy: the policy that made the plan.
      log: the events of the search.
      rivals: variants that may be as fast, as `Found` has them; none once it is tuned.
      tuner: runs the step while its first calls are timed (`tune=True`).
      tuning: the result of that; None before it is known.
      whole: the step as it was traced, before any technique, and its costs.
      cache: the predicted traffic of a step without its tensor cache, and with it; None without.
    """

    traced: TracedStep
    budget: int | None
    plain_need: int | None
    costs: Costs
    attempts: tuple[Attempt, ...]
    policy: AbstractPolicy
    log: SearchLog
    rivals: tuple[Callable[[], Variant], ...] = ()
    tuner: Callable[..., Any] | None = None
    tuning: Tuning | None = None
    whole: tuple[Program, Costs] | None = None
    cache: tuple[Traffic, Traffic] | None = None

    @property
    def best(self) -> Attempt:
        return self.attempts[-1]

    @property
    def transport(self) -> AbstractTransport | None:
        """What moves the plan's values; None if it moves none."""
        return getattr(self.best.compiled, "transport", None)
