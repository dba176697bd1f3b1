"""Who does each convolution, on programs drawn by hand and at random: valid, within the budget."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import BACKWARD, Builder, programs
from hypothesis import given
from hypothesis import strategies as st

from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro, Pass
from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import planned_program, simulate_plan
from vmem_jax.core.tuning import agree
from vmem_jax.core.validate import check_made_for, peak_by_definition, violations
from vmem_jax.errors import PlanError
from vmem_jax.policy import Auto, Infeasible, Keep
from vmem_jax.policy.convolving import Convolving

CONVOLUTION = Convolution(
    Pass.FORWARD, "float32", False, 8, 4, 4, (5, 5), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)
)


def way(parts: int, workspace: int, seconds: float, engine: int = 7) -> Configuration:
    size = CONVOLUTION.batch // parts
    return Configuration((Micro(size, engine, (), workspace, seconds / parts),) * parts)


def convolutional(program, which):
    """`program` with the steps of `which` as convolutions."""
    steps = [
        dataclasses.replace(step, convolution=CONVOLUTION) if s in which else step
        for s, step in enumerate(program.steps)
    ]
    return dataclasses.replace(program, steps=tuple(steps))


def check(program, plan, costs, budget):
    """That `plan` holds, and what is predicted for it: (peak, seconds)."""
    assert violations(program, plan) == []
    assert budget is None or plan.predicted_peak <= budget
    planned = planned_program(program, plan)
    assert plan.predicted_peak == peak_by_definition(planned, plan.order, plan.transfers)
    timeline = simulate_plan(program, plan, costs)
    assert (timeline.peak, timeline.seconds) == (plan.predicted_peak, plan.predicted_seconds)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    return plan.predicted_peak, plan.predicted_seconds


def chain(layers=4, size=10):
    """Forward steps, and backward steps that read their inputs; every forward step a convolution."""
    b = Builder()
    values = [b.input(size)]
    for _ in range(layers):
        values.append(b.step([values[-1]], size))
    cotangent = b.step([values[-1]], size, BACKWARD)
    for value in reversed(values[:-1]):
        cotangent = b.step([cotangent, value], size, BACKWARD)
    return convolutional(b.program([cotangent]), range(layers))


CHAIN = chain()
OWN, DIVIDED, LEAST = way(1, 100, 1.0, XLA), way(2, 40, 1.2), way(8, 5, 3.0)
COSTS = Costs(
    "unit", (1.0,) * len(CHAIN.steps), convolutions={s: (OWN, DIVIDED, LEAST) for s in range(4)}
)


def plan(budget, costs=COSTS, inner=None):
    found = Convolving(inner or Keep()).plan(CHAIN, costs, budget)
    check(CHAIN, found, costs, budget)
    return found, [w for _, w in found.convolutions]


@pytest.mark.parametrize(
    "budget, expected",
    [
        (None, [OWN] * 4),
        (1000, [OWN] * 4),
        (150, [OWN] * 3 + [DIVIDED]),  # 20 for the ends, and ten more with every layer
        (100, [DIVIDED] * 4),
        (88, [DIVIDED] * 2 + [LEAST] * 2),
        (75, [DIVIDED] + [LEAST] * 3),
    ],
)
def test_each_has_the_fastest_that_fits_where_it_stands(budget, expected):
    found, ways = plan(budget)
    assert ways == expected
    assert found.fenced == (expected != [OWN] * 4)
    assert found.predicted_seconds == pytest.approx(
        sum(w.seconds for w in ways) + len(CHAIN.steps) - 4
    )


def test_the_least_is_said_where_nothing_fits():
    outcome = Convolving(Keep()).plan(CHAIN, COSTS, 30)
    assert isinstance(outcome, Infeasible)
    lowest = outcome.plan
    # the peak is a backward step's: what has room below it need not be slow for it
    assert [w for _, w in lowest.convolutions] == [DIVIDED] + [LEAST] * 3
    assert outcome.minimum_peak == lowest.predicted_peak == 70
    assert check(CHAIN, lowest, COSTS, None) == (70, 1.2 + 3 * 3.0 + len(CHAIN.steps) - 4)


def test_dividing_is_weighed_against_recomputing():
    """A budget that either of both reaches: what costs less is done."""
    budget = 155  # five less than what the last layer takes, all kept, with XLA's own
    dear = tuple(dataclasses.replace(m, seconds=9.0) for m in DIVIDED.micros)
    slow = {s: (OWN, Configuration(dear)) for s in range(4)}
    by_dividing, ways = plan(budget, inner=Auto(allow=("order", "recompute")))
    assert DIVIDED in ways and not by_dividing.recomputed
    by_recomputing, ways = plan(
        budget,
        dataclasses.replace(COSTS, convolutions=slow),
        inner=Auto(allow=("order", "recompute")),
    )
    assert ways == [OWN] * 4 and by_recomputing.recomputed


@pytest.mark.parametrize("budget", [None, 1000])
@pytest.mark.parametrize("gain, taken", [(0.01, False), (0.05, True)])
def test_xlas_own_stay_where_others_gain_too_little(gain, taken, budget):
    """All of it is predicted to be faster by a share of the step that is, or is not, worth it."""
    step_seconds = len(CHAIN.steps)  # each takes one
    ours = way(2, 40, 1 - gain * step_seconds / 4)
    costs = dataclasses.replace(COSTS, convolutions=dict.fromkeys(range(4), (OWN, ours)))
    found, ways = plan(budget, costs)
    assert ways == [ours if taken else OWN] * 4
    assert found.fenced == taken


def test_without_choices_it_is_the_policy_itself():
    costs = Costs("unit", COSTS.seconds)
    assert Convolving(Keep()).plan(CHAIN, costs, None) == Keep().plan(CHAIN, costs, None)
    assert Convolving(Auto()).name == "auto"


def test_the_search_ends_where_no_other_is_faster():
    """Planning takes seconds for large programs: it is done again only where that may help."""

    class Counting(Keep):
        planned = 0

        def plan(self, program, costs, budget):
            Counting.planned += 1
            return super().plan(program, costs, budget)

    for budget, times in ((1000, 1), (100, 2)):  # here the caps between hold all to the least
        Counting.planned = 0
        plan(budget, inner=Counting())
        assert Counting.planned == times, budget


def test_what_was_seen_to_take_longer_is_reckoned_so():
    """`jit(tune=True)`: costs by which the plan takes as long as it did, its convolutions too."""
    found, _ = plan(100)
    for seconds in (2 * found.predicted_seconds, found.predicted_seconds / 3):
        agreed = agree(CHAIN, COSTS, found, seconds)
        assert simulate_plan(CHAIN, found, agreed).seconds == pytest.approx(seconds)
        ratio = agreed.seconds[0] / COSTS.seconds[0]
        assert agreed.convolutions[0][1].seconds == pytest.approx(ratio * DIVIDED.seconds)


@given(programs(), st.data())
def test_random_programs_and_ways(program, data):
    """Valid and inside the budget; never slower than with XLA's own, nor with the least, alone."""
    steps = data.draw(st.sets(st.integers(0, len(program.steps) - 1), max_size=4), "convolutions")
    program = convolutional(program, steps)
    number = st.integers(0, 30)
    ways = {
        s: (
            way(1, data.draw(number), data.draw(st.sampled_from([0.5, 1.0])), XLA),
            way(2, data.draw(number), data.draw(st.sampled_from([0.75, 1.5]))),
            way(4, data.draw(number), 2.0),
        )
        for s in sorted(steps)
    }
    seconds = tuple(ways[s][0].seconds if s in ways else 1.0 for s in range(len(program.steps)))
    costs = Costs("unit", seconds, convolutions=ways)
    policy = Convolving(Auto(allow=("order", "recompute")))
    free = policy.plan(program, costs, None)
    high, _ = check(program, free, costs, None)
    budget = data.draw(st.integers(high // 2, high), "budget")
    found = policy.plan(program, costs, budget)
    if isinstance(found, Infeasible):
        return
    _, took = check(program, found, costs, budget)
    # where all is free, XLA's own are kept for less than `gain`
    assert took >= (1 - policy.gain) * free.predicted_seconds - 1e-9
    assert policy.lower_bound_seconds(program, costs, budget) <= took * (1 + 1e-6)
    for only in (0, 2):  # one way for each
        held = dataclasses.replace(costs, convolutions={s: (w[only],) for s, w in ways.items()})
        other = policy.plan(program, held, budget)
        if isinstance(other, Infeasible):
            continue
        least = all(w[only].workspace == min(x.workspace for x in w) for w in ways.values())
        fastest = all(w[only].seconds == min(x.seconds for x in w) for w in ways.values())
        if least or fastest:
            assert took <= other.predicted_seconds + 1e-9


@pytest.mark.parametrize(
    "convolutions, says",
    [
        (((99, OWN),), "a configuration is of step 99 of 9"),
        (((6, OWN),), "is no convolution that can be divided"),
        (((0, way(2, 5, 1.0)), (0, OWN)), "has two configurations"),
        (((0, Configuration(DIVIDED.micros[:1])),), "micro-batches of 4 samples, and a batch of 8"),
        (
            ((0, Configuration((Micro(8, 1, (), 9, 1.0, channels=8),))),),
            "padded to 8 channels, and its 4 can be padded to none",
        ),
    ],
)
def test_wrong_plans_are_refused(convolutions, says):
    found, _ = plan(100)
    with pytest.raises(PlanError, match=says):
        check_made_for(CHAIN, dataclasses.replace(found, convolutions=convolutions))


@pytest.mark.parametrize(
    "saved",
    [
        "1",
        "[1]",
        "[[0]]",
        '[["0", []]]',
        "[[0, []]]",
        '[[0, [[4, 7, [], 40, "1"]]]]',
        "[[0, [[4]]]]",
        '[[0, "", [[4, 7, [], 40, 1.0]]]]',
        '[[0, "", [[4, 7, [], 40, 1.0, "8"]]]]',
    ],
)
def test_damaged_configurations_are_refused(saved):
    import json

    found, _ = plan(100)
    raw = json.loads(found.to_json()) | {"convolutions": json.loads(saved)}
    with pytest.raises(PlanError, match="convolutions of the wrong type"):
        Plan.from_json(json.dumps(raw))
