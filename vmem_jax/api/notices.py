"""notices: warnings about a plan that was found: what a user would want to know, and do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from vmem_jax.core.planned import predicted_need
from vmem_jax.errors import show_nbytes
from vmem_jax.policy import Infeasible, Keep
from vmem_jax.search.attempt import Attempt
from vmem_jax.search.params import SearchParams
from vmem_jax.search.variant import Variant
from vmem_jax.techniques import StepContext


@dataclasses.dataclass(frozen=True)
class NoticeParams:
    """When something is worth a warning.

    Attributes:
      slow, bearable: a plan that is predicted to take `slow` times plain's seconds gives a warning,
        which names the budget at which it would take `bearable` times; `looks` plans are made to find
        that budget.
      sure: where plain jit was not compiled, it is said to be within the budget if so many times the
        predicted need of the captured step are. That step has exact residuals, which plain jit
        lacks: VGG-16(256) needs 2.3 times as much without them.
    """

    slow: float = 1.5
    bearable: float = 1.1
    looks: int = 4
    sure: float = 2.5


PARAMS = NoticeParams()


def notices(
    step: StepContext,
    best: Attempt,
    budget: int | None,
    plain_need: int | None,
    whole: Callable[[], Variant],
    search_params: SearchParams,
) -> list[str]:
    """What is worth a warning about the plan `best`.

    Args:
      budget: bytes.
      plain_need: bytes that plain jit needs, where that was compiled.
      search_params: what the search took as the tolerance of predicted seconds.
      whole: the variant of the user's policy with the batch as a whole.
    """
    found = [f"{stacks}." for stacks in best.variant.origin.captured.whole]
    plain, seconds = sum(step.plain_costs.seconds), best.plan.predicted_seconds
    slow = budget is not None and plain > 0 and seconds > PARAMS.slow * plain
    if slow and budget is not None:
        enough = _budget_for(whole(), PARAMS.bearable * plain, budget, PARAMS.looks)
        text = (
            f"in {show_nbytes(budget)} the fastest plan that was found is predicted to take "
            f"{seconds / plain:.1f} times as long as plain jit, {seconds * 1e3:.2f} ms for "
            f"{plain * 1e3:.2f} ms."
        )
        if enough:
            text += f" In {show_nbytes(enough)} it would be {PARAMS.bearable} times."
        found.append(text)
    if budget is not None and step.settings.budget != "device":
        need = plain_need or int(PARAMS.sure * _captured_need(step))
        if need <= budget:
            how = "needs" if plain_need else "is predicted to need less than"
            found.append(
                f"plain jit {how} {show_nbytes(need)}, and the budget is {show_nbytes(budget)}: a "
                "smaller one would save memory."
            )
    if _a_profile_would_tell(step) and seconds > (1 + search_params.time_tolerance) * plain:
        found.append(
            f"the plan is predicted to take {seconds / plain - 1:.0%} longer than plain jit, by a "
            "roofline. Measured times (`profile=True`, or `vmem-jax profile`; about 20 s) let it "
            "move values to host memory while others are computed, which may be faster."
        )
    return found


def _captured_need(step: StepContext) -> int:
    """Bytes that the step is predicted to need as it was captured, with its smaller residuals."""
    program = step.traced.captured.program
    plan = Keep().plan(program, step.costs, None)
    assert not isinstance(plan, Infeasible), "there is no budget"
    return predicted_need(program, plan)


def _a_profile_would_tell(step: StepContext) -> bool:
    """Whether values could move, but the plan moves none since no time was measured."""
    settings = step.settings
    here = step.target is None and not step.inlined and settings.profile is None
    return here and not step.costs.sources and bool(step.transport and step.immovable)


def _budget_for(variant: Variant, seconds: float, budget: int, looks: int) -> int | None:
    """About the lowest budget, in bytes, at which `variant` is predicted to take at most `seconds`;
    None if no budget is enough."""
    free = variant.policy.plan(variant.program, variant.costs, None)
    if isinstance(free, Infeasible) or free.predicted_seconds > seconds:
        return None
    low, high = budget, max(budget, free.predicted_peak)
    for _ in range(looks):
        middle = (low + high) // 2
        plan = variant.policy.plan(variant.program, variant.costs, middle)
        if isinstance(plan, Infeasible) or plan.predicted_seconds > seconds:
            low = middle
        else:
            high = middle
    return high
