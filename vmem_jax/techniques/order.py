"""order: exact residuals, and the order of the steps. Every policy but `keep` uses it."""

from __future__ import annotations

from typing import ClassVar

from vmem_jax.techniques.base import AbstractTechnique
from vmem_jax.techniques.context import StepContext


class Order(AbstractTechnique):
    """Another order of the steps, and smaller residuals that give the backward pass the same bits."""

    name: ClassVar[str] = "order"
    verb: ClassVar[str] = "change the order of its steps"

    def unusable(self, step: StepContext) -> str:
        return ""
