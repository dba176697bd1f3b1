"""row_kernels: one kernel for what is made of a softmax's rows.

XLA makes one kernel of a softmax only where its rows nearly fill a power of two. Of others it reads
the scores for the maxima, for the sums and for the weights, and in the backward pass twice; here a
kernel reads them once. Values are the same but for the order of sums and the last digits of
exponentials.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vmem_jax.capture.row_kernels import find_row_kernels
from vmem_jax.core.costs import analytic
from vmem_jax.policy import Keep
from vmem_jax.rewrite.row_kernels import with_row_kernels
from vmem_jax.techniques import own_kernels
from vmem_jax.techniques.base import AbstractTechnique, Form
from vmem_jax.techniques.context import StepContext


class RowKernels(AbstractTechnique):
    """Softmaxes by kernels that read each row once."""

    name: ClassVar[str] = "row_kernels"
    verb: ClassVar[str] = "reduce rows in the kernels that read them"

    def unusable(self, step: StepContext) -> str:
        if why := self._not_here(step):
            return why
        if step.cached("row kernels", lambda: find_row_kernels(step.traced.captured.flat)):
            return ""
        return "no large softmax outside of loops has rows that XLA reads more than once"

    def _not_here(self, step: StepContext) -> str:
        if step.platform != "gpu":
            return "its kernels are for GPUs"
        plan = step.settings.plan
        is_planned = plan is not None and plan.row_kernels > 0
        return own_kernels.why_not(step, is_planned or self.name in step.settings.named)

    def adapt(self, step: StepContext, form: Form) -> Form:
        """Replaces the equations where that is predicted to be faster, and the costs of the whole
        step by those of what runs then."""
        plan, is_kept = step.settings.plan, isinstance(form.chosen, Keep)
        is_wanted = self.name in step.settings.allowed if plan is None else plan.row_kernels > 0
        if not is_wanted or is_kept or self._not_here(step):
            return form
        captured = form.traced.captured
        parts = captured.sub_batches
        smaller = None if parts is None else parts.smaller
        (flat, *others), count = with_row_kernels([captured.flat, *([smaller] if smaller else [])])
        if not count:
            return form
        replaced = captured.with_row_kernels(flat, others[0] if others else None, count)
        takes = lambda program: sum(analytic(program, step.machine).seconds)
        if plan is None and takes(replaced.program) >= takes(captured.program):
            return form
        traced = dataclasses.replace(form.traced, captured=replaced)
        costs = step.of(traced).costs if form.count == 1 else form.costs
        return dataclasses.replace(form, traced=traced, costs=costs)
