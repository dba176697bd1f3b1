"""failure: the BudgetError of a search in which no plan fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from vmem_jax.core.planned import planned_program, restated, simulate_plan
from vmem_jax.errors import BudgetError, show_nbytes
from vmem_jax.policy.base import arguments_and_outputs, at_the_peak, where_peak
from vmem_jax.search.attempt import Found

MOST_HELPS = 3
"""Of an error, which is to be read on one screen."""


@dataclasses.dataclass(frozen=True)
class Help:
    """What may help a step that does not fit.

    Attributes:
      text: what the user can do, or what stands in the way; one sentence without its full stop.
      nbytes: by how much the lowest peak is predicted to fall; None if nothing predicts it.
      asked: whether it is about what the user asked for by name.
    """

    text: str
    nbytes: int | None = None
    asked: bool = False


def budget_error(
    policy: str,
    budget: int,
    found: Found,
    resident: int,
    helps: Callable[[int], Sequence[Help]] = lambda lowest: (),
) -> BudgetError:
    """The error for `found`, which does not fit: the lowest peak, where it is, and what helps.

    Args:
      policy: the name of the policy that the user chose.
      budget: bytes.
      resident: bytes of the arguments and outputs.
      helps: what may help, given the lowest peak in bytes.
    """
    best = found.best
    program = best.variant.program
    plan = restated(best.plan, best.costs)
    timeline = simulate_plan(program, plan, best.costs)
    program = planned_program(program, plan)
    peak = program.steps[timeline.order[timeline.peak_at]] if timeline.peak_at >= 0 else None
    more, holders = [*helps(best.need)], at_the_peak(program, timeline)
    at = where_peak(program, timeline)
    compiled = best.compiled
    if peak is None and compiled and compiled.memory_analysis().temp_size_in_bytes:
        at = "copies of arguments that are returned in each other's places"
    if program.arguments_nbytes > budget:
        holders = arguments_and_outputs(program)
    elif peak is not None and peak.convolution and peak.workspace:
        text = (
            "Time what else can do the convolution at the peak, with `profile=True` or `vmem-jax "
            'profile --conv`, and leave `allow` out or let it name "workspace"'
        )
        more.append(Help(text, peak.workspace))
    return BudgetError(
        policy=policy,
        budget=budget,
        lowest_peak=best.need,
        at=at,
        holders=holders,
        compiled=True,
        advice=advice(budget, best.need, resident, more),
        lowest_plan=dataclasses.replace(best.plan, budget=best.need),
    )


def advice(budget: int, lowest: int, resident: int, helps: Sequence[Help]) -> str:
    """`helps` for people, the largest predicted effect first, and what always helps.

    What is predicted to be enough comes before what is not; a larger budget or a smaller batch is
    always enough, and comes after what costs nothing.
    """
    missing = lowest - budget
    always = f"Ask for a larger `budget`: {lowest} ({show_nbytes(lowest)}) is met"
    if resident < budget:
        share = (budget - resident) / (lowest - resident)
        always += f"; or take a smaller batch, about {share:.0%} of this one"
    else:
        always += "; or take a smaller model or dtype: no plan can free the arguments and outputs"
    known = sorted(((help.nbytes, help.text) for help in helps if help.nbytes), reverse=True)
    enough = [f"{text}: predicted to be enough" for nbytes, text in known if nbytes >= missing]
    less = [f"{text}: about {show_nbytes(n)} less" for n, text in known if n < missing]
    asked = [help.text for help in helps if help.nbytes is None and help.asked]
    unknown = [help.text for help in helps if help.nbytes is None and not help.asked]
    enough = enough[: MOST_HELPS - 1]
    shown = [*enough, always, *asked, *less, *unknown][:MOST_HELPS]
    return "\n".join(f"  {i}. {text}." for i, text in enumerate(shown, 1))
