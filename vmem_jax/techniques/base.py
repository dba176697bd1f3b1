"""AbstractTechnique: something that a plan may do, named by `allow`.

A technique says whether a step can use it, or why not. Some are decisions of the policy alone (order,
recompute). Others change the form of the step: they wrap the policy in one that plans with them, and
extend its costs. `sub_batches` and `compress` add further forms to choose from.
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
    """A form of a step. Techniques adapt it one after another.

    Attributes:
      traced: the traced step of this form.
      count: the number of sub-batches.
      chosen: the policy without the wrappers of techniques.
      policy, costs: the arguments of planning.
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
        """Whether it has a convolution with a choice of configurations."""
        return any(step.convolution for step in self.traced.captured.program.steps)


class AbstractTechnique(abc.ABC):
    """One technique.

    Class attributes:
      name: its name in `allow`.
      verb: its verb in errors: "cannot offload".
    """

    name: ClassVar[str]
    verb: ClassVar[str]

    @abc.abstractmethod
    def unusable(self, step: StepContext) -> str:
        """Why `step` does not use this technique, for people; "" if it may."""

    def adapt(self, step: StepContext, form: Form) -> Form:
        """`form` with this technique; unchanged if the technique is of no use there."""
        del step
        return form
