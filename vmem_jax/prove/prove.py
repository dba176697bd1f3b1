"""prove: compile a plan and read what it needs; plan again with the difference taken off.

Only the compiler knows the peak. At most four compiles, typically one or two; the fastest by
prediction that fits is kept, and nothing over the budget is ever returned. If plans that move
buffers or divide convolutions do not fit, the last try does neither.

What is compiled is a plan that fits as XLA's heap is predicted to place it (`prove.placed`).

What XLA's own convolutions take is not known before XLA has chosen their algorithms, so it is read
from the first compiled step, and the next plan is made with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging

from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import planned_program, predicted_need, restated, simulate_plan
from vmem_jax.core.program import Program
from vmem_jax.errors import BudgetError, show_nbytes
from vmem_jax.policy.base import AbstractPolicy, what_holds, where_peak
from vmem_jax.policy.keep import Keep
from vmem_jax.prove.placed import Placed, lowest_of, placed, planned

MOST_COMPILES = 4

_PLAIN = 2.0
"""Of a budget: an untouched program that is predicted to need more is not compiled to see."""

_AS_MUCH = 0.99
"""Of the bytes that a lowest plan compiled to: where another comes to no less, no more are tried."""

_FAR = 1.1
"""As many times what was predicted for the lowest plan, and it does not tell how low others get."""

_LESS_EXTREME = (1.25, 1.6)
"""As many times the lowest predicted peak: what is planned for then."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One plan and what it compiled to.

    Attributes:
      plan: the plan; its `budget` is what it was planned for, at or below the user's.
      compiled: the compiled step.
      need: bytes, arguments + outputs − aliased + temporaries, as the compiler counts them.
      predicted_need: bytes that this was predicted to be, with XLA's heap.
      costs: what the plan was made from, with what its compiled step has taught since.
      plan_seconds: seconds that planning took.
    """

    plan: Plan
    compiled: Any
    need: int
    predicted_need: int
    costs: Costs
    plan_seconds: float = 0.0

    @property
    def transport(self) -> Any:
        """The way that the plan's transfers go, an `AbstractTransport`; None if it has none."""
        return getattr(self.compiled, "transport", None)


def need_nbytes(compiled: Any) -> int:
    """Bytes of device memory that a compiled step needs.

    `peak_memory_in_bytes` is not used: it counts host buffers on some backends and leaves the
    temporaries out on the CPU.
    """
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


def prove(
    program: Program,
    policy: AbstractPolicy,
    costs: Costs,
    budget: int | None,
    compile_plan: Callable[[Plan], Any],
    plain_need: int | None = None,
    learn: Callable[[Costs, Any], Costs] = lambda costs, compiled: costs,
    first: Placed | None = None,
    to_the_lowest: bool = True,
) -> tuple[Attempt, ...]:
    """Returns the attempts, the best last: it fits, by the compiler's own figures.

    Args:
      budget: bytes, or None for no limit.
      compile_plan: Plan -> compiled step; called at most `MOST_COMPILES` times.
      plain_need: bytes that the untouched program needs, where that is known.
      learn: what a compiled step teaches about what convolutions take.
      first: what is planned for the budget, where that was asked already.
      to_the_lowest: whether the lowest plan is compiled where none is predicted to fit.

    Raises:
      BudgetError: no attempt fits, or the policy has no plan to try.
    """
    attempts: list[Attempt] = []
    goal, fewer = budget, False  # what is predicted may need so much, and is made with those means
    lowest: list[Attempt] = []  # those of which nothing lower was predicted
    while len(attempts) < MOST_COMPILES:
        start = time.perf_counter()
        last = len(attempts) == MOST_COMPILES - 1
        one = None if attempts else first
        if last and not fewer and any(map(_uses_more, attempts)):
            # what they do is packed worse than predicted here: the last try goes without, if it can
            with contextlib.suppress(BudgetError):
                one = planned(program, policy, _fewer(costs), budget)
                fewer, goal = True, budget
        means = _fewer(costs) if fewer else costs
        before = None
        if attempts and not fewer:
            before = Placed(attempts[-1].plan, attempts[-1].predicted_need)
        is_lowest = False
        try:
            one = placed(program, policy, means, goal, first=one, before=before)
        except BudgetError as error:
            # Nothing that low is predicted to exist: compile the lowest that does, since the
            # compiler may pack better than predicted, and it tells the true lowest peak.
            is_lowest = True
            one = lowest_of(program, error) if to_the_lowest else None
            if one is not None:
                one = dataclasses.replace(one, seconds=time.perf_counter() - start)
                one = None if _says_nothing(one, attempts, lowest) else one
        if one is None or any(_same(a.plan, one.plan) for a in attempts):
            if fewer or not any(map(_uses_more, attempts)):
                break
            fewer, goal = True, budget
            continue
        attempt = _attempt(one, budget, costs, compile_plan, learn)
        attempts.append(attempt)
        lowest += [attempt] * is_lowest
        costs = attempt.costs
        if budget is None or attempt.need <= budget or not one.plan.fenced:
            break
        # The compiler's excess over what would now be predicted, taken off what is planned for; a
        # little more each time, since freeing other values moves the peak.
        excess = attempt.need - predicted_need(program, restated(attempt.plan, costs))
        goal = budget - max(excess, 0) - (len(attempts) - 1) * (budget // 100)
    fits = lambda attempt: budget is None or attempt.need <= budget
    if budget is not None and not any(map(fits, attempts)):
        kept = _untouched(program, costs, budget, attempts, plain_need)
        if kept is not None:
            attempts.append(_attempt(kept, budget, costs, compile_plan))
    if budget is not None and not any(map(fits, attempts)):
        attempts += _less_extreme(program, policy, costs, budget, attempts, compile_plan)
    fitting = [a for a in attempts if fits(a)]
    if not fitting:
        raise _cannot_fit(program, policy, costs, budget or 0, attempts)
    best = min(fitting, key=lambda a: a.plan.predicted_seconds)
    return (*(a for a in attempts if a is not best), best)


def _attempt(
    one: Placed,
    budget: int | None,
    costs: Costs,
    compile_plan: Callable[[Plan], Any],
    learn: Callable[[Costs, Any], Costs] = lambda costs, compiled: costs,
) -> Attempt:
    """A plan, compiled. What it was planned for may be lower; it is proved for the user's budget."""
    plan = dataclasses.replace(one.plan, budget=budget)
    logging.info("%s: %s as placed", plan, show_nbytes(one.need))
    start = time.perf_counter()
    compiled = compile_plan(one.plan)
    need = need_nbytes(compiled)
    logging.info("compiled to %s in %.1f s", show_nbytes(need), time.perf_counter() - start)
    return Attempt(plan, compiled, need, one.need, learn(costs, compiled), one.seconds)


def _fewer(means: Costs) -> Costs:
    """What is left to plan with, where nothing moves and every convolution is XLA's own."""
    own = {s: ways[:1] for s, ways in means.convolutions.items()}
    return dataclasses.replace(means, link=None, convolutions=own)


def _uses_more(attempt: Attempt) -> bool:
    """Whether its plan uses what is left out then."""
    return attempt.plan.moves or bool(attempt.plan.divided)


def _same(a: Plan, b: Plan) -> bool:
    calls = lambda plan: [(s, way.calls) for s, way in plan.divided]
    facts = lambda plan: (plan.order, plan.transfers, plan.looped, calls(plan))
    return facts(a) == facts(b)


def _says_nothing(one: Placed, attempts: Sequence[Attempt], lowest: Sequence[Attempt]) -> bool:
    """Whether a lowest plan need not be compiled: another came to less than is predicted for it, or
    the last two lowest plans to as much as one another."""
    stuck = len(lowest) > 1 and lowest[-1].need >= _AS_MUCH * lowest[-2].need
    return stuck or any(one.need >= attempt.need for attempt in attempts)


def _untouched(
    program: Program,
    costs: Costs,
    budget: int,
    attempts: Sequence[Attempt],
    plain_need: int | None,
) -> Placed | None:
    """The untouched program, if it may fit where no plan does: fences can cost a few bytes too."""
    if program.hosted or program.sub_batches > 1:
        return None  # the plain step has what is hosted on the device, and its batch as a whole
    if not attempts or any(not a.plan.fenced for a in attempts):
        return None  # the arguments alone are too large; or it was among them
    kept = planned(program, Keep(), costs, None)
    if plain_need is not None:
        return kept if plain_need <= budget else None
    may = len(attempts) < MOST_COMPILES and kept.need <= _PLAIN * budget
    return kept if may else None


def _less_extreme(
    program: Program,
    policy: AbstractPolicy,
    costs: Costs,
    budget: int,
    attempts: Sequence[Attempt],
    compile_plan: Callable[[Plan], Any],
) -> Iterator[Attempt]:
    """Plans for somewhat more than the lowest that is predicted, where that compiled to far more.

    The lowest of all runs nearly everything again, many times over, and every fence of it costs.
    What runs a tenth of that again is predicted higher and compiles lower, and is what an error
    should name.
    """
    if not attempts:
        return
    best, tried = min(attempts, key=lambda a: a.need), [a.plan for a in attempts]
    least = min(plan.predicted_peak for plan in tried)
    for factor in _LESS_EXTREME[: MOST_COMPILES - len(attempts)]:
        if best.need <= _FAR * best.predicted_need:
            return
        try:
            one = planned(program, policy, costs, int(factor * least))
        except BudgetError:
            continue
        if one.need >= best.need or any(_same(one.plan, other) for other in tried):
            continue
        attempt = _attempt(one, budget, costs, compile_plan)
        tried.append(one.plan)
        yield attempt
        best = min(best, attempt, key=lambda a: a.need)


def _cannot_fit(
    program: Program,
    policy: AbstractPolicy,
    costs: Costs,
    budget: int,
    attempts: Sequence[Attempt],
) -> BudgetError:
    """The error that names the lowest compiled peak, or the policy's own where nothing compiled."""
    if not attempts:
        try:
            policy.plan(program, costs, budget)
        except BudgetError as error:
            return error
    lowest = min(attempts, key=lambda a: a.need)
    plan = restated(lowest.plan, costs)
    timeline = simulate_plan(program, plan, costs)
    program = planned_program(program, plan)
    peak = program.steps[timeline.order[timeline.peak_at]] if timeline.peak_at >= 0 else None
    advice = ""
    if peak is not None and peak.convolution and lowest.need - peak.workspace <= budget:
        advice = (
            "Without the workspace of that convolution it would fit: time what else can do it, with "
            "`profile=True` or `vmem-jax profile --conv`, and leave `allow` out or let it name "
            '"workspace"; or ask for a larger `budget`.'
        )
    return BudgetError(
        policy=policy.name,
        budget=budget,
        lowest_peak=lowest.need,
        at=where_peak(program, timeline),
        holders=what_holds(program, timeline.order, timeline.peak_at, timeline.transfers),
        compiled=True,
        advice=advice,
        lowest_plan=dataclasses.replace(lowest.plan, budget=lowest.need),
    )
