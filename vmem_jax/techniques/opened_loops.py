"""opened_loops: training steps that are the body of a scan, such as those of gradient accumulation,
are planned inside of it. Part of "order"."""

from __future__ import annotations

import dataclasses

from vmem_jax.capture.opened_loops import opened
from vmem_jax.techniques.context import StepContext

POLICIES = ("auto", "exact", "recompute")
"""Those that plan inside; a published system has no loops."""


def opened_contexts(step: StepContext, budget: int | None) -> list[StepContext]:
    """The form of `step` whose largest loop of a training step is planned inside; none where there is
    no such loop, nothing has to fit, or the policy leaves loops as they are."""
    settings = step.settings
    chooses = settings.policy.name in POLICIES and (settings.sub_batches or 1) == 1
    if budget is None or not chooses:
        return []
    form = opened_context(step)
    return [] if form is None else [form]


def opened_context(step: StepContext) -> StepContext | None:
    """The same, whatever the policy; None where there is no such loop."""
    return step.cached("opened", lambda: _opened(step))


def _opened(step: StepContext) -> StepContext | None:
    captured = opened(step.traced.captured)
    if captured is None:
        return None
    return step.of(dataclasses.replace(step.traced, captured=captured))
