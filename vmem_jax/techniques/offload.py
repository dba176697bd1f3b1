"""offload: values wait in pinned host memory between two uses. Policies choose which and when."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vmem_jax.techniques.base import AbstractTechnique, Form
from vmem_jax.techniques.context import StepContext


class Offload(AbstractTechnique):
    """Transfers to host memory and back, while other steps run."""

    name: ClassVar[str] = "offload"
    verb: ClassVar[str] = "offload"

    def unusable(self, step: StepContext) -> str:
        return step.immovable

    def adapt(self, step: StepContext, form: Form) -> Form:
        """Removes the link if nothing may move. In the loop over sub-batches only the native
        extension moves values, and not together with hosted arguments."""
        costs, traced = form.costs, form.traced
        moves = form.moves and (form.count == 1 or step.transport == "ffi")
        if not moves and not traced.hosted:
            costs = dataclasses.replace(costs, link=None)
        traced = traced.moved_by(step.transport if form.moves else "")
        return dataclasses.replace(form, traced=traced, costs=costs)
