"""entry: what `jit` keeps for one set of shapes: the step as traced, and as planned and proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from vmem_jax.batch_arguments import BatchArguments
from vmem_jax.capture import Captured
from vmem_jax.capture.batch import Batch
from vmem_jax.core.costs import Costs
from vmem_jax.core.tuning import Tuning
from vmem_jax.jax_compat import ClosedJaxpr
from vmem_jax.policy import AbstractPolicy
from vmem_jax.prove.prove import Attempt


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step for one set of shapes: captured, not yet planned.

    Attributes:
      plain: its jaxpr as it was traced.
      whole: the tree of (args, kwargs) where the compiled step takes those as they are; None where
        it takes the leaves (static arguments, modules, arguments in host memory).
      hosted: for each argument in host memory its index, and that of the result that goes there.
      batch: which arguments hold the batch.
    """

    plain: ClosedJaxpr
    captured: Captured
    avals: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[bool, ...]
    names: tuple[str, ...]
    out_tree: Any
    aux: Any
    whole: Any
    hosted: tuple[tuple[int, int | None], ...]
    batch: BatchArguments

    def in_sub_batches(self, batch: Batch, count: int) -> Traced:
        """The same, which must run its batch as a whole, in at most `count` sub-batches."""
        return dataclasses.replace(self, captured=self.captured.in_sub_batches(batch, count))

    def moved_by(self, transport: str) -> Traced:
        """The same, with everything movable that `transport` can move."""
        if transport != "memory_kinds":
            return self
        return dataclasses.replace(self, captured=self.captured.moved_by_the_compiler())


@dataclasses.dataclass(frozen=True)
class Entry:
    """A step for one set of shapes: planned, compiled, proved.

    Attributes:
      budget: bytes that it was proved against; None for a given plan without a budget.
      plain_need: bytes that plain jit needs, where that was compiled.
      attempts: every plan that was compiled; the last is the one that runs.
      policy: that planned it.
      tuner: what runs it instead while its first calls are timed (`tune=True`).
      tuning: what that gave.
      unsplit: why its batch cannot run in parts, for people; "" where it can.
      uncompressed: why nothing is compressed, for people; "" where that was not asked for.
    """

    traced: Traced
    budget: int | None
    plain_need: int | None
    costs: Costs
    attempts: tuple[Attempt, ...]
    policy: AbstractPolicy
    tuner: Callable[..., Any] | None = None
    tuning: Tuning | None = None
    unsplit: str = ""
    uncompressed: str = ""

    @property
    def best(self) -> Attempt:
        return self.attempts[-1]
