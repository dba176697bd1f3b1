"""tuning: corrects the costs of a step by the measured seconds of the whole step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection

from vmem_jax.core.costs import Costs, Source
from vmem_jax.core.params import PARAMS
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import simulate_plan
from vmem_jax.core.program import Program

_HALVINGS = 40


@dataclasses.dataclass(frozen=True)
class Timed:
    """A plan of which some calls were timed.

    Attributes:
      what: the name of the plan, for people.
      predicted: seconds of one call by prediction.
      measured: the median of the measured seconds; None if it did not run.
      note: why it did not run, for people.
    """

    what: str
    predicted: float
    measured: float | None
    note: str = ""

    def __str__(self) -> str:
        if self.measured is None:
            return f"{self.what}: {self.note}"
        return (
            f"{self.what}: measured {self.measured * 1e3:.2f} ms, predicted "
            f"{self.predicted * 1e3:.2f} ms ({self.predicted / max(self.measured, 1e-12) - 1:+.0%})"
        )


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of timing the first calls of a step.

    Attributes:
      first: the plan that the search chose.
      others: the plans that were timed beside it.
      note: why no further plan was timed, for people.
    """

    first: Timed
    others: tuple[Timed, ...] = ()
    note: str = ""

    @property
    def kept(self) -> Timed:
        """The plan that was measured to be fastest; of several the earliest."""
        return min(self._all, key=lambda one: math.inf if one.measured is None else one.measured)

    def __str__(self) -> str:
        lines = [f"{one}, kept" if one is self.kept else f"{one}" for one in self._all]
        return "; ".join([*lines, *([self.note] if self.note else [])])

    @property
    def _all(self) -> tuple[Timed, ...]:
        return self.first, *self.others


def scaled(costs: Costs, factor: float) -> Costs:
    """`costs` with the seconds of every step times `factor`; copies stay."""
    return _scaled(costs, costs.sources, range(len(costs.seconds)), factor)


def agree(program: Program, costs: Costs, plan: Plan, seconds: float) -> Costs:
    """Costs with which one run of `plan` is predicted to take `seconds`.

    Measured seconds stay, and the others are scaled by one factor. If no plausible factor exists, or
    if everything was measured, the seconds of all steps are scaled; if the link prevents that too,
    the link is scaled as well.

    Raises:
      ValueError: `seconds` or the plan's prediction are not positive.
    """
    total = lambda costs: simulate_plan(program, plan, costs).seconds
    predicted = total(costs)
    if not (seconds > 0 and predicted > 0):
        raise ValueError(f"a step of {predicted} s by prediction and {seconds} s by the clock.")
    every = range(len(program.steps))
    sources = costs.sources or (Source.ROOFLINE,) * len(every)
    guessed = [s for s in every if sources[s] in (Source.CALIBRATED, Source.ROOFLINE)]
    for steps in (guessed, every):
        times = functools.partial(_scaled, costs, sources, steps)
        factor = _solve(times, total, seconds)
        if factor is not None:
            return times(factor)
    ratio = seconds / predicted
    link = costs.link and dataclasses.replace(
        costs.link,
        out=costs.link.out / ratio,
        into=costs.link.into / ratio,
        both=costs.link.both / ratio,
    )
    return dataclasses.replace(_scaled(costs, sources, every, ratio), link=link)


def _scaled(
    costs: Costs, sources: tuple[Source, ...], steps: Collection[int], factor: float
) -> Costs:
    chosen = frozenset(steps)
    return dataclasses.replace(
        costs,
        seconds=tuple(t * factor if s in chosen else t for s, t in enumerate(costs.seconds)),
        convolutions={
            s: tuple(c.scaled(factor) for c in each) if s in chosen else each
            for s, each in costs.convolutions.items()
        },
        sources=tuple(
            Source.CALIBRATED if s in chosen and source is Source.ROOFLINE else source
            for s, source in enumerate(sources)
        ),
    )


def _solve(
    scaled: Callable[[float], Costs], total_of: Callable[[Costs], float], seconds: float
) -> float | None:
    """The factor that makes the total `seconds`, by bisection; None if it is not within bounds.

    Slower steps never make a step as a whole faster, so the total does not fall.
    """
    total = lambda factor: total_of(scaled(factor))
    low, high = 1 / PARAMS.corrected_times, PARAMS.corrected_times
    if not total(low) <= seconds <= total(high):
        return None
    if total(low) == total(high):
        return None  # these steps take no time
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if total(middle) < seconds else (low, middle)
    return (low * high) ** 0.5
