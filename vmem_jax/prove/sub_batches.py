"""In how many sub-batches a step runs: the fastest number of them that fits, or the fewest.

More of them need less memory and take more time: every kernel is launched once for each, and reads
its weights again. For the fastest, the step is planned for more and more of them, as long as what
the steps take without any recomputation is less than the best plan so far; and what is best by
prediction, as XLA will place it, is proved. Where its proof ends with a plan that takes much longer
than the first, the next is proved, too. Where all that were proved compile to more than the budget,
the most sub-batches are, which need the least.

The fewest are those of moDNN (Chen et al., DATE 2018, section IV-A, equations 1 to 3): the largest
sub-batch of which every task fits beside the weights, with the workspace of its fastest algorithm.
The paper solves for its size again and again until it converges; here the numbers that there may be
are tried in rising order. Of these, the first with a plan that fits is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import logging

from vmem_jax.core.costs import Costs
from vmem_jax.core.liveness import least_nbytes
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import with_convolutions
from vmem_jax.core.program import Program
from vmem_jax.errors import BudgetError
from vmem_jax.policy.base import AbstractPolicy, Splitting
from vmem_jax.policy.convolving import fastest
from vmem_jax.prove.placed import Placed, lowest_of, placed
from vmem_jax.prove.prove import Attempt, prove

MOST_PROVED = 3
"""Numbers of sub-batches that are compiled, one by one, until one is found; and then the largest."""

WORTH = 0.95
"""Of the seconds of a plan that fits: another number that is not predicted to take less than this is
not compiled. Predictions are off by as much (docs/benchmarks.md)."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A step in some number of sub-batches, with what plans it, what compiles its plans, and what
    that teaches.

    Attributes:
      first: what is planned for the budget, where that was asked already.
    """

    program: Program
    policy: AbstractPolicy
    costs: Costs
    compile_plan: Callable[[Plan], Any]
    learn: Callable[[Costs, Any], Costs] = lambda costs, compiled: costs
    first: Placed | None = None

    def least_seconds(self, budget: int | None = None) -> float:
        """That no plan of it goes below."""
        return self.policy.least_seconds(self.program, self.costs, budget)


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A number of sub-batches, and what is known of it.

    Attributes:
      seconds: of its plan, or that no plan of it goes below.
      first: its plan, where one was made.
    """

    count: int
    seconds: float = 0.0
    first: Placed | None = None


def prove_in_parts(
    member: Callable[[int], Member],
    counts: Iterable[int],
    budget: int | None,
    plain_need: int | None = None,
    splitting: Splitting = Splitting.FASTEST,
    to_the_lowest: bool = True,
) -> tuple[int, tuple[Attempt, ...]]:
    """In how many of `counts` sub-batches the step runs, and the attempts for that, the best last.

    Args:
      member: the step in so many sub-batches.
      counts: in rising order, at least one.
      budget: bytes, or None for no limit.
      plain_need: bytes that the untouched program needs, where that is known.
      splitting: which of those that fit is wanted.
      to_the_lowest: as `prove` has it.

    Raises:
      BudgetError: none fits; the one with the lowest peak.
    """
    best: tuple[int, tuple[Attempt, ...]] | None = None
    lowest: BudgetError | None = None
    ranked = _ranked(member, [*counts], budget, splitting)
    most = sorted(ranked[MOST_PROVED:], key=lambda candidate: candidate.count)[-1:]
    for candidate in (*ranked[:MOST_PROVED], *most):
        if best is not None and candidate.seconds >= WORTH * _seconds(best):
            break
        one = member(candidate.count)
        if best is not None and one.least_seconds() >= WORTH * _seconds(best):
            break
        first = candidate.first or one.first
        try:
            means = one.program, one.policy, one.costs, budget
            compiles = one.compile_plan, plain_need, one.learn
            attempts = prove(*means, *compiles, first=first, to_the_lowest=to_the_lowest)
        except BudgetError as error:
            logging.info("in %d sub-batches: %s", candidate.count, error)
            if lowest is None or error.lowest_peak < lowest.lowest_peak:
                lowest = error
            continue
        found = candidate.count, attempts
        if splitting is not Splitting.FASTEST:
            return found
        best = found if best is None else min(best, found, key=_seconds)
    if best is not None:
        return best
    assert lowest is not None, "every number of sub-batches has a plan or an error"
    raise lowest


def _seconds(found: tuple[int, tuple[Attempt, ...]]) -> float:
    """Of the plan that is best."""
    return found[1][-1].plan.predicted_seconds


def _ranked(
    member: Callable[[int], Member],
    counts: Sequence[int],
    budget: int | None,
    splitting: Splitting,
) -> list[_Candidate]:
    """`counts` in the order in which they are worth a try: what fits, the fastest or the fewest
    first, and then what takes longer in any case; where nothing fits, the one that needs the least.
    """
    if len(counts) == 1:
        return [_Candidate(counts[0])]
    fitting, slower = list[_Candidate](), list[_Candidate]()
    others, hopeless = list[tuple[int, _Candidate]](), list[tuple[int, _Candidate]]()  # with needs
    for i, count in enumerate(counts):
        one = member(count)
        fewest = splitting is Splitting.FEWEST
        if fitting and (fewest or one.least_seconds() >= fitting[0].seconds):
            return fitting + slower + [*map(_Candidate, counts[i:])]
        program = one.program
        if fewest:
            program = with_convolutions(program, fastest(one.costs.convolutions).items())
        if budget is not None and (least := least_nbytes(program)) > budget:
            hopeless.append((least, _Candidate(count)))
            continue
        if fitting and (bound := one.least_seconds(budget)) >= fitting[0].seconds:
            slower.append(_Candidate(count, bound))
            continue
        means = one.program, one.policy, one.costs, budget
        try:
            first = placed(*means, first=one.first)
        except BudgetError as error:
            low = lowest_of(program, error)
            others.append((low.need if low else error.lowest_peak, _Candidate(count)))
            continue
        candidate = _Candidate(count, first.plan.predicted_seconds, first)
        if first.fits(budget):
            fitting = sorted((*fitting, candidate), key=lambda each: (each.seconds, each.count))
        else:
            others.append((first.need, candidate))
    # what is the same for all numbers, a gradient of weights, hides what more of them save
    lowest = sorted(hopeless, key=lambda each: (each[0], -each[1].count))[:1]
    lowest = sorted(others, key=lambda each: (each[0], each[1].count))[:1] or lowest
    return fitting + slower or [candidate for _, candidate in lowest]
