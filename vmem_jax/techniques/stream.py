"""stream: arguments in pinned host memory are fetched where they are read, and the results that
replace them in the state return there."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vmem_jax.policy.streaming import Streaming
from vmem_jax.techniques.base import AbstractTechnique, Form
from vmem_jax.techniques.context import StepContext


class Stream(AbstractTechnique):
    """Transfers of arguments that the caller keeps in host memory."""

    name: ClassVar[str] = "stream"
    verb: ClassVar[str] = "stream arguments"

    def unusable(self, step: StepContext) -> str:
        return "" if step.traced.hosted else "none of its arguments is in host memory"

    def adapt(self, step: StepContext, form: Form) -> Form:
        if not form.traced.hosted or form.costs.link is None:
            return form
        moves = form.moves and form.count == 1
        policy = Streaming(form.policy, form.costs.link, moves=moves)
        return dataclasses.replace(form, policy=policy)
