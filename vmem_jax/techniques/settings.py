"""The settings of `jit`, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vmem_jax.core.machine import Machine
from vmem_jax.core.plan import Plan
from vmem_jax.policy import AbstractPolicy
from vmem_jax.policy.base import Splitting
from vmem_jax.tracing.arguments import Signature


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `jit`, which explains them.

    Attributes:
      name: of the step.
      signature: its arguments: which are donated, static, the batch.
      allowed: all techniques that a plan may use.
      named: those that the user's `allow` names, or the policy needs.
      required: those that are an error where the step cannot use them: what the policy needs, and
        what `allow` names alone.
    """

    name: str
    signature: Signature
    budget: int | float | str | None
    policy: AbstractPolicy
    allowed: tuple[str, ...]
    named: tuple[str, ...]
    required: tuple[str, ...]
    plan: Plan | None
    host_budget: int | None
    transport: str
    compiler_options: Mapping[str, Any]
    machine: Machine | None
    profile: bool | None
    sub_batches: int | None
    density: float | None

    @property
    def splitting(self) -> Splitting:
        """In how many sub-batches the step runs where `sub_batches` does not say."""
        return self.policy.splitting if "sub_batches" in self.allowed else Splitting.WHOLE
