"""A step for one set of shapes as it was traced: captured, not yet planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from vmem_jax.capture import Captured
from vmem_jax.capture.batch import Batch
from vmem_jax.jax_compat import ClosedJaxpr
from vmem_jax.rewrite.bodies import with_ordered_bodies
from vmem_jax.tracing.batch_arguments import BatchArguments


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step for one set of shapes: captured, not yet planned.

    Attributes:
      plain: the jaxpr as it was traced.
      whole: the tree of (args, kwargs), if the compiled step takes these unchanged; None if it takes
        the leaves (static arguments, modules, arguments in host memory).
      hosted: for each argument in host memory, its index and that of the result that replaces it.
      batch: the arguments that hold the batch.
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

    def in_sub_batches(self, batch: Batch, count: int, size: int | None = None) -> TracedStep:
        """The same, which must run its batch as a whole, in at most `count` sub-batches; `size` as
        `capture.sub_batches.divided` has it."""
        chosen = self.captured.program.kept is not None
        bodies = [with_ordered_bodies] if chosen else []
        captured = self.captured.in_sub_batches(batch, count, size, *bodies)
        return dataclasses.replace(self, captured=captured)

    def moved_by(self, transport: str) -> TracedStep:
        """The same, with everything movable that `transport` can move."""
        if transport != "memory_kinds":
            return self
        return dataclasses.replace(self, captured=self.captured.moved_by_the_compiler())
