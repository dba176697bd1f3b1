"""steps_in_loops: training steps that are the body of a scan, such as those of gradient accumulation,
are planned inside of it (`capture.opened_loops`). Part of "order"."""

from __future__ import annotations

from vmem_jax.techniques.context import StepContext

POLICIES = ("auto", "exact", "recompute")
"""Those that plan inside; a published system has no loops."""


def opened_contexts(step: StepContext, budget: int | None) -> list[StepContext]:
    """The form of `step` whose largest loop of a training step is planned inside; none where there is
    no such loop, nothing has to fit, or the policy leaves loops as they are."""
    settings = step.settings
    chooses = settings.policy.name in POLICIES and (settings.sub_batches or 1) == 1
    if budget is None or not chooses or step.opened is None:
        return []
    return [step.opened]
