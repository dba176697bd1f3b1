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
    """The arguments of `jit`; its docstring explains those that are not listed here.

    Attributes:
      name: the name of the step.
      signature: which of its arguments are donated, static, or hold the batch.
      allowed: all techniques that a plan may use.
      named: the techniques that the user's `allow` names, or that the policy needs.
      required: the techniques that must be usable: those that the policy needs, and the only one
        that `allow` names.
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
        """How the number of sub-batches is chosen if `sub_batches` is not given."""
        return self.policy.splitting if "sub_batches" in self.allowed else Splitting.WHOLE
