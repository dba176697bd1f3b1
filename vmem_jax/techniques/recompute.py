"""recompute: values are dropped and computed again where they are read. Policies choose which."""

from __future__ import annotations

from typing import ClassVar

from vmem_jax.techniques.base import AbstractTechnique
from vmem_jax.techniques.context import StepContext


class Recompute(AbstractTechnique):
    """Steps that run again."""

    name: ClassVar[str] = "recompute"
    verb: ClassVar[str] = "recompute"

    def unusable(self, step: StepContext) -> str:
        if any(s.pure and s.reads for s in step.traced.captured.program.steps):
            return ""
        return "none of its steps may run again"
