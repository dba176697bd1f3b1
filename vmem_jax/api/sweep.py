"""sweep: the trade of seconds against bytes, from searches that share their work.

Between two plans, one that needs less and one that is faster, lies a box of bytes and seconds that
may hold others. The largest box is searched next, at the middle of its bytes; what is found there
divides it. So a few searches go where the trade is steep. Hamacher, Pedersen and Ruzika, "Finding
representative systems for discrete bicriterion optimization problems", Operations Research Letters
35 (2007).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from vmem_jax.core.pareto_point import ParetoPoint
from vmem_jax.core.planned import techniques_of
from vmem_jax.search.attempt import Attempt, Found

CLOSE = 0.01
"""Of the bytes, or of the seconds: two plans that differ by less have no box between them. Predicted
seconds are off by more than that (`SearchParams.time_tolerance`)."""

SAME = 0.001
"""Of the seconds: a larger plan that is faster by less is no point of its own."""


def point_of(attempt: Attempt, compiled: bool = True) -> ParetoPoint:
    """`attempt` as a point, which may be predicted alone."""
    plan = dataclasses.replace(attempt.plan, budget=attempt.need)
    return ParetoPoint(
        budget=attempt.need,
        predicted_seconds=plan.predicted_seconds,
        predicted_peak=attempt.predicted_need,
        compiled_peak=attempt.need if compiled else None,
        techniques=techniques_of(attempt.variant.program, plan),
        plan=plan,
    )


@dataclasses.dataclass(frozen=True)
class _Box:
    """What is not searched: budgets of more than `low` and less than `high` bytes, whose plans take
    between `fast` and `slow` seconds."""

    low: int
    high: int
    fast: float
    slow: float

    @property
    def area(self) -> float:
        """In bytes times seconds; 0 for a box that is too small to search."""
        nbytes, seconds = self.high - self.low, self.slow - self.fast
        small = nbytes <= CLOSE * self.high or seconds <= CLOSE * self.fast
        return 0.0 if small else nbytes * seconds


def sweep(find: Callable[[int], Found], most: int, points: int) -> list[Attempt]:
    """The plans of which none is both slower and larger than another, from the smallest.

    Args:
      find: what a search finds for a budget in bytes.
      most: the budget that anything fits.
      points: searches.
    """
    seen: list[Attempt] = []

    def search(budget: int) -> Attempt | None:
        found = find(budget)
        seen.extend(dataclasses.replace(attempt, compiled=None) for attempt in found.attempts)
        return found.best if found.fits else None

    fastest = search(most)
    search(1)  # what nothing fits shows the minimum
    if not seen:
        return []
    lowest = min(seen, key=lambda attempt: (attempt.need, attempt.plan.predicted_seconds))
    fastest = fastest or lowest
    seconds = lambda attempt: attempt.plan.predicted_seconds
    boxes = [_Box(lowest.need, fastest.need, seconds(fastest), seconds(lowest))]
    for _ in range(points - 2):
        box = max(boxes, key=lambda box: box.area, default=None)
        if box is None or not box.area:
            break
        boxes.remove(box)
        middle = (box.low + box.high) // 2
        found = search(middle)
        slow = box.slow if found is None else min(seconds(found), box.slow)
        boxes.append(_Box(middle, box.high, box.fast, slow))
        if found is not None:
            boxes.append(_Box(box.low, min(found.need, middle), slow, box.slow))
    return front(seen)


def front(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Those of which none is both slower and larger than another, from the smallest."""
    ranked = sorted(attempts, key=lambda one: (one.need, one.plan.predicted_seconds))
    found: list[Attempt] = []
    for one in ranked:
        if not found or one.plan.predicted_seconds < (1 - SAME) * found[-1].plan.predicted_seconds:
            found.append(one)
    return found
