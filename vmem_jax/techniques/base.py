"""What a technique is: a thing that a plan may do, which `allow` names.

A technique says whether a step can use it, and why not. Some are choices of the policy alone (order,
recompute). Others make another form of the step: they take the policy into one that plans with them,
and add to its costs what they can do. `sub_batches` and `compress` give further forms to choose from.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from vmem_jax.core.costs import Costs
from vmem_jax.policy import AbstractPolicy
from vmem_jax.techniques.context import StepContext
from vmem_jax.tracing.traced import TracedStep


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of a step, as techniques make it one after another.

    Attributes:
      traced: the step of this form.
      count: of sub-batches.
      chosen: the policy that is asked for, without what techniques put around it.
      policy, costs: what plans are made with.
      moves: whether plans of this form may move values.
    """

    traced: TracedStep
    count: int
    chosen: AbstractPolicy
    policy: AbstractPolicy
    costs: Costs
    moves: bool

    @staticmethod
    def whole(step: StepContext) -> Form:
        """The step with its batch as a whole, before any technique."""
        policy = step.settings.policy
        return Form(step.traced, 1, policy, policy, step.costs, moves=not step.immovable)

    @property
    def convolves(self) -> bool:
        """Whether it has a convolution that other configurations may do."""
        return any(step.convolution for step in self.traced.captured.program.steps)


class AbstractTechnique(abc.ABC):
    """One technique.

    Class attributes:
      name: as `allow` has it.
      verb: what a step does with it, for errors: "cannot offload".
    """

    name: ClassVar[str]
    verb: ClassVar[str]

    @abc.abstractmethod
    def unusable(self, step: StepContext) -> str:
        """Why `step` cannot use it, or does without, for people; "" where it may be used."""

    def adapt(self, step: StepContext, form: Form) -> Form:
        """`form` with this technique, or without it where that is of no use there."""
        del step
        return form
