"""failure: the BudgetError of a search in which no plan fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vmem_jax.core.planned import planned_program, restated, simulate_plan
from vmem_jax.errors import BudgetError
from vmem_jax.policy.base import ARGUMENTS_ADVICE, arguments_and_outputs, what_holds, where_peak
from vmem_jax.search.search import Found


def budget_error(policy: str, budget: int, found: Found, hints: Sequence[str] = ()) -> BudgetError:
    """The error for `found`, which does not fit: the minimum peak, where it is, and what helps.

    Args:
      policy: the name of the policy that the user chose.
      budget: bytes.
      hints: advice, the best first; used unless there is something more specific to say.
    """
    if found.best is None:
        assert found.failure is not None, "nothing was compiled, so the policies said why"
        failure = found.failure
        return BudgetError(
            policy=policy,
            budget=budget,
            lowest_peak=failure.minimum_peak,
            at=failure.at,
            holders=failure.holders,
            advice=failure.advice or " ".join(hints),
            lowest_plan=failure.plan,
        )
    lowest = found.best
    program = lowest.variant.program
    plan = restated(lowest.plan, lowest.costs)
    timeline = simulate_plan(program, plan, lowest.costs)
    program = planned_program(program, plan)
    peak = program.steps[timeline.order[timeline.peak_at]] if timeline.peak_at >= 0 else None
    advice, holders = " ".join(hints), what_holds(program, timeline)
    if program.resident_nbytes > budget:
        advice, holders = ARGUMENTS_ADVICE, arguments_and_outputs(program)
    elif peak is not None and peak.convolution and lowest.need - peak.workspace <= budget:
        advice = (
            "Without the workspace of that convolution it would fit: time what else can do it, with "
            "`profile=True` or `vmem-jax profile --conv`, and leave `allow` out or let it name "
            '"workspace"; or ask for a larger `budget`.'
        )
    return BudgetError(
        policy=policy,
        budget=budget,
        lowest_peak=lowest.need,
        at=where_peak(program, timeline),
        holders=holders,
        compiled=True,
        advice=advice,
        lowest_plan=dataclasses.replace(lowest.plan, budget=lowest.need),
    )
