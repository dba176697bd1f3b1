"""The forms of a step that are proved: by which policy, moving or not, in how many sub-batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from vmem_jax.errors import BudgetError, HostMemoryError
from vmem_jax.policy.base import Splitting
from vmem_jax.prove.placed import Placed
from vmem_jax.prove.prove import Attempt
from vmem_jax.prove.sub_batches import WORTH, Member, prove_in_parts

T = TypeVar("T")


@dataclasses.dataclass
class Form(Generic[T]):
    """A step by one policy, in some numbers of sub-batches, each made when it is asked for.

    Attributes:
      make: the step in so many, as its maker has it, with what plans and compiles it.
      counts: those to try, in rising order.
      splitting: which of them is wanted.
      made: those there are; each that is asked for is added.
      to_the_lowest: as `prove` has it.
      seconds: that its plan is predicted to take; infinite where it is not tried for its speed.
    """

    make: Callable[[int], tuple[T, Member]]
    counts: Sequence[int]
    splitting: Splitting
    made: dict[int, tuple[T, Member]] = dataclasses.field(default_factory=dict)
    to_the_lowest: bool = True
    seconds: float = math.inf

    def of(self, count: int) -> tuple[T, Member]:
        if count not in self.made:
            self.made[count] = self.make(count)
        return self.made[count]

    def member(self, count: int) -> Member:
        return self.of(count)[1]

    def note(self, count: int, first: Placed, fits: bool) -> None:
        """What is planned for the budget, so that it is not planned again."""
        origin, one = self.of(count)
        self.made[count] = origin, dataclasses.replace(one, first=first)
        if fits:
            self.seconds = min(self.seconds, first.plan.predicted_seconds)


@dataclasses.dataclass(frozen=True)
class Proof(Generic[T]):
    """A form that fits, in `count` sub-batches; of its attempts the best is the last."""

    form: Form[T]
    count: int
    attempts: tuple[Attempt, ...]

    @property
    def seconds(self) -> float:
        return self.attempts[-1].plan.predicted_seconds


Outcome = tuple[Proof[T] | None, BudgetError | None]
"""The best proof, and the error with the lowest peak; None where there is no such."""


def best_of(
    forms: Iterable[Form[T]], budget: int | None, plain_need: int | None, so_far: Outcome[T]
) -> Outcome[T]:
    """`so_far`, or what comes of `forms`, one after another, until the next cannot be better.

    Args:
      forms: the fastest first, those that are not tried for their speed before all others.
      budget, plain_need: as `prove_in_parts` has them.
    """
    best, lowest = so_far
    for form in forms:
        if best is not None and form.seconds >= WORTH * best.seconds:
            break
        try:
            means = budget, plain_need, form.splitting, form.to_the_lowest
            found = Proof(form, *prove_in_parts(form.member, form.counts, *means))
        except BudgetError as error:
            if form.to_the_lowest and (lowest is None or error.lowest_peak < lowest.lowest_peak):
                lowest = error
            continue
        except HostMemoryError:
            if best is None:
                raise
            continue  # planned again it moves more than was planned for at first
        best = found if best is None else min(best, found, key=lambda proof: proof.seconds)
    return best, lowest
