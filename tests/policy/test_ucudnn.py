"""µ-cuDNN over a whole network: WR and WD, the batch-size policies, and what it leaves alone."""

from __future__ import annotations

import dataclasses

import pytest
from networks import CONV, Spec, network, with_algorithms

from vmem_jax import UCuDNN, WorkspaceError
from vmem_jax.core.convolution import XLA, Configuration, Micro
from vmem_jax.core.costs import Costs
from vmem_jax.core.planned import simulate_plan
from vmem_jax.core.validate import violations
from vmem_jax.policy import Infeasible
from vmem_jax.policy.ucudnn import allowed
from vmem_jax.policy.workspace_division import front
from vmem_jax.policy.workspace_reuse import BatchSizes

BATCH = 256
NET = network([CONV, Spec("act", 8), Spec("pool", 4), CONV, CONV])


def whole(workspace, seconds):
    return Micro(BATCH, XLA, (), workspace, seconds)


def part(batch, workspace, seconds, engine=4):
    return Micro(batch, engine, (), workspace, seconds)


def with_ways(*micros_of_each):
    """NET with a batch of 256, and for its convolutions in turn the desirable sets of `micros`."""
    program, costs = with_algorithms(NET.program, NET.costs({}, rate=1.0))
    steps = list(program.steps)
    choices: dict[int, tuple[Configuration, ...]] = {}
    for s, micros in zip(costs.convolutions, micros_of_each, strict=True):
        convolution = dataclasses.replace(steps[s].convolution, batch=BATCH)
        steps[s] = dataclasses.replace(steps[s], convolution=convolution)
        own = Configuration((micros[0],))
        ways = [w for w in front(micros, BATCH) if w.workspace < own.workspace]
        choices[s] = (own, *ways)
    program = dataclasses.replace(program, steps=tuple(steps))
    return program, dataclasses.replace(costs, convolutions=choices)


def chosen(policy, program, costs, budget=None):
    plan = policy.plan(program, costs, budget)
    assert violations(program, plan) == []
    assert plan.order == tuple(range(len(program.steps)))
    assert not plan.transfers and not plan.recomputed
    timeline = simulate_plan(program, plan, costs)
    assert (timeline.peak, timeline.seconds) == (plan.predicted_peak, plan.predicted_seconds)
    return [[(m.engine, m.batch) for m in way.micros] for _, way in plan.convolutions]


# The figure gives the sizes of the micro-batches, "@128" and "@64", and no times.
def test_figure_3_only_convolutions_are_divided():
    """conv1 in two parts of 128, conv2 in four of 64: each the fastest that the limit allows."""
    gemm = lambda: whole(0, 40.0)
    conv1 = [gemm(), part(128, 60, 10.0), part(64, 30, 6.0)]
    conv2 = [gemm(), part(128, 120, 10.0), part(64, 60, 6.0)]
    slow = [gemm(), part(64, 200, 6.0)]
    # XLA's own comes first in what can be chosen, whatever its workspace
    program, costs = with_ways(conv1, conv2, slow)
    costs = dataclasses.replace(
        costs,
        convolutions={
            s: (costs.convolutions[s][0], *front(micros, BATCH))
            for s, micros in zip(costs.convolutions, (conv1, conv2, slow), strict=True)
        },
    )
    found = chosen(UCuDNN("wr", limit=60), program, costs)
    assert found == [[(4, 128)] * 2, [(4, 64)] * 4, [(XLA, BATCH)]]


def figure_5():
    """The micro-batches of its DP: algorithm 4 is fast and allows 60 samples, 0 needs nothing."""
    quick = [part(b, 2 * b, 0.5 + b / 100) for b in range(1, BATCH)]
    plain = [part(b, 0, 0.02 + b / 50, 0) for b in range(1, BATCH)]
    return [*quick, *plain]


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (BatchSizes.ALL, [(4, 60)] * 4 + [(0, 16)]),
        (BatchSizes.POWER_OF_TWO, [(0, 128)] * 2),
        (BatchSizes.UNDIVIDED, None),
    ],
)
def test_figure_5_and_the_batch_size_policies(sizes, expected):
    program, costs = with_algorithms(NET.program, NET.costs({}))
    some = [m for m in figure_5() if m.batch in (1, 2, 4, 8, 16, 32, 64, 128)]
    every = Configuration((whole(0, 9.0),)), *front(figure_5(), BATCH), *front(some, BATCH)
    steps = list(program.steps)
    for s in costs.convolutions:
        convolution = dataclasses.replace(steps[s].convolution, batch=BATCH)
        steps[s] = dataclasses.replace(steps[s], convolution=convolution)
    program = dataclasses.replace(program, steps=tuple(steps))
    costs = dataclasses.replace(costs, convolutions=dict.fromkeys(costs.convolutions, every))
    found = chosen(UCuDNN("wr", limit=120, batch_sizes=sizes), program, costs)
    assert found == [expected or [(XLA, BATCH)]] * 3


def test_figure_7_the_desirable_set_has_nothing_that_is_beaten():
    """c needs more workspace than c′ and is slower, so it is not in D(C)."""
    best, beaten, least = part(128, 40, 5.0), part(128, 50, 6.0), part(64, 10, 4.0)
    ways = tuple(Configuration((m,) * (BATCH // m.batch)) for m in (best, beaten, least))
    found = allowed(ways, BatchSizes.POWER_OF_TWO)
    assert [way.micros[0] for way in found] == [least, best]


OWN = whole(100, 10.0)
HALVES = part(128, 50, 6.0)
SMALL = part(32, 5, 2.5)
DEAR = part(128, 50, 9.0)


def test_wd_divides_one_limit_where_it_gains_most():
    program, costs = with_ways([OWN, HALVES, SMALL], [OWN, DEAR, SMALL], [OWN, HALVES, SMALL])
    own, halves, small = [(XLA, BATCH)], [(4, 128)] * 2, [(4, 32)] * 8
    assert chosen(UCuDNN("wd", limit=300), program, costs) == [own] * 3
    assert chosen(UCuDNN("wd", limit=200), program, costs) == [halves, own, halves]
    assert chosen(UCuDNN("wd", limit=15), program, costs) == [small] * 3
    assert chosen(UCuDNN("wr", limit=50), program, costs) == [halves, [(4, 128)] * 2, halves]
    for policy in (UCuDNN("wd", limit=14), UCuDNN("wr", limit=4)):
        with pytest.raises(WorkspaceError):
            policy.plan(program, costs, None)


@pytest.mark.parametrize("optimisation", ["wr", "wd"])
def test_the_limit_follows_from_the_budget(optimisation):
    """Less memory, never faster; what fits no more is Infeasible, with the least that does."""
    program, costs = with_ways(*[[OWN, HALVES, SMALL]] * 3)
    policy, last = UCuDNN(optimisation), 0.0
    high = policy.plan(program, costs, None).predicted_peak
    seen = set()
    for budget in range(high + 250, 0, -1):
        found = policy.plan(program, costs, budget)
        if isinstance(found, Infeasible):
            assert found.minimum_peak == budget + 1 == found.plan.predicted_peak
            break
        assert found.predicted_peak <= budget and found.predicted_seconds >= last - 1e-9
        assert found.fenced  # where nothing is divided, too: a budget is met in this order alone
        last = found.predicted_seconds
        seen.add(tuple(len(way.micros) for _, way in found.convolutions))
    assert {(1, 1, 1), (8, 8, 8)} < seen


def test_wr_without_a_limit_is_the_best_of_wr_with_each_limit():
    """At every budget: the fastest of the plans for all limits that a workspace has."""
    program, costs = with_ways([OWN, HALVES, SMALL], [OWN, DEAR, SMALL], [OWN, SMALL])
    limits = {c.workspace for ways in costs.convolutions.values() for c in ways}
    limits = [n for n in limits if n >= SMALL.workspace]
    plans = [UCuDNN("wr", limit=n).plan(program, costs, None) for n in limits]
    peaks = {plan.predicted_peak for plan in plans}
    assert len(peaks) > 1
    for budget in sorted({p + more for p in peaks for more in (-1, 0, 1)}):
        within = [plan.predicted_seconds for plan in plans if plan.predicted_peak <= budget]
        found = UCuDNN("wr").plan(program, costs, budget)
        if within:
            assert found.predicted_seconds == min(within)
        else:
            assert isinstance(found, Infeasible)


def test_without_convolutions_it_is_the_traced_step():
    plan = UCuDNN().plan(NET.program, Costs("unit", (1.0,) * len(NET.program.steps)), None)
    assert plan.convolutions == () and not plan.fenced


def test_unknown_options():
    with pytest.raises(ValueError, match="there is wr, wd"):
        UCuDNN("both")
    with pytest.raises(ValueError, match="there is all, powerOfTwo"):
        UCuDNN(batch_sizes="some")
    assert UCuDNN(batch_sizes="all") == UCuDNN(batch_sizes=BatchSizes.ALL)
