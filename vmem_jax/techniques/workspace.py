"""workspace: convolutions in micro-batches, with the fastest algorithm that fits at their step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vmem_jax.conv.candidates import with_choices
from vmem_jax.core.costs import Costs
from vmem_jax.policy.convolving import Convolving
from vmem_jax.techniques.base import AbstractTechnique, Form
from vmem_jax.techniques.context import StepContext


class Workspace(AbstractTechnique):
    """Configurations of convolutions other than XLA's own."""

    name: ClassVar[str] = "workspace"
    verb: ClassVar[str] = "divide convolutions"

    def unusable(self, step: StepContext) -> str:
        if not self._wanted(step):
            if step.target is not None:
                return f"what convolutions take on {step.target!r} is measured on that card alone"
            return "a CPU's convolutions are divided only where `allow` names it"
        return _choices(step, Form.whole(step))[1]

    def adapt(self, step: StepContext, form: Form) -> Form:
        if step.settings.plan is not None or not form.convolves:
            return form
        if self._wanted(step):
            form = dataclasses.replace(form, costs=_choices(step, form)[0])
        if form.chosen.chooses_convolutions:
            return form
        return dataclasses.replace(form, policy=Convolving(form.policy))

    def _wanted(self, step: StepContext) -> bool:
        settings = step.settings
        if self.name in settings.named:
            return True
        return self.name in settings.allowed and step.target is None and step.platform == "gpu"


def _choices(step: StepContext, form: Form) -> tuple[Costs, str]:
    """The costs of `form` with the configurations of each convolution; and why none is known."""
    settings, program = step.settings, form.traced.captured.program
    # convolutions of a part of the batch are not timed here, but known times are used
    profile = settings.profile if form.count == 1 or not settings.profile else None
    whole = None if form.count == 1 else (step.traced.captured.program, step.costs)
    where = step.devices[0], step.target
    sizes = form.chosen.micro_batches
    return with_choices(settings.name, program, form.costs, *where, profile, whole, sizes)
