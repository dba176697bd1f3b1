"""Every policy keeps the same laws on random programs; `auto` is held against exhaustive search."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import BACKWARD, SHAPES, UPDATE, Builder, orders, plan_of, programs, unit_costs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import Spec, network, with_algorithms

from vmem_jax import POLICIES
from vmem_jax.core.costs import Costs, Link
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import planned_program, simulate_plan
from vmem_jax.core.simulate import simulate
from vmem_jax.core.validate import peak_by_definition, violations
from vmem_jax.policy import Infeasible
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.order import canonical_order
from vmem_jax.policy.recomputation import Drop

layers = st.builds(
    Spec,
    st.sampled_from(["conv", "conv", "pool", "act", "act", "fc"]),
    st.integers(1, 16),
    reads=st.sampled_from(["x", "y", "xy"]),
)

some = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def flop_costs(program) -> Costs:
    return Costs("flops", tuple(float(s.flops) for s in program.steps))


def planned(name, program, budget, costs=None) -> Plan | Infeasible:
    """What policy `name` returns, checked: a plan that fits, or Infeasible with the lowest plan."""
    policy, costs = POLICIES[name](), costs or flop_costs(program)
    outcome = policy.plan(program, costs, budget)
    assert POLICIES[name]().plan(program, costs, budget) == outcome  # a pure function
    if isinstance(outcome, Infeasible):
        assert budget is not None
        assert (outcome.policy, outcome.budget) == (name, budget)
        assert outcome.minimum_peak > budget
        assert outcome.minimum_peak >= program.resident_nbytes
        assert outcome.plan.predicted_peak == outcome.minimum_peak
        check_plan(name, program, budget, costs, outcome.plan)  # it is compiled, too
    else:
        assert budget is None or outcome.predicted_peak <= budget
        least = policy.lower_bound_seconds(program, costs, budget)
        assert least <= outcome.predicted_seconds * (1 + 1e-6)
        check_plan(name, program, budget, costs, outcome)
    return outcome


def check_plan(name, program, budget, costs, plan):
    """That `plan` is a valid schedule, says whose it is, and predicts what its simulation gives."""
    assert violations(program, plan) == []
    assert (plan.program, plan.policy, plan.budget) == (program.fingerprint, name, budget)
    timeline = simulate_plan(program, plan, costs)
    assert (plan.predicted_peak, plan.predicted_seconds) == (timeline.peak, timeline.seconds)
    assert plan.predicted_peak == peak_by_definition(
        planned_program(program, plan), plan.order, plan.transfers
    )


def between(program, share):
    """A budget at `share` of the way from what is always held to the traced order's peak."""
    low = program.resident_nbytes
    high = simulate(program, range(len(program.steps)), flop_costs(program)).peak
    return int(low + share * (high - low))


@pytest.mark.parametrize("name", POLICIES)
@some
@given(program=programs(pure=True), share=st.floats(0, 1.1))
def test_plans_are_valid_and_fit(name, program, share):
    planned(name, program, between(program, share))
    planned(name, program, None)


@pytest.mark.parametrize("name", POLICIES)
@settings(some, max_examples=25)
@given(specs=st.lists(layers, min_size=2, max_size=8), share=st.floats(0, 1.1), data=st.data())
def test_plans_that_may_move_and_choose_convolutions(name, specs, share, data):
    """Small networks with a link, with joins, and with three algorithms for each convolution."""
    for n in range(2, len(specs)):
        if data.draw(st.booleans(), "join"):
            other = data.draw(st.integers(0, n - 2), "joined")
            specs[n] = dataclasses.replace(specs[n], sources=(n - 1, other))
    net = network(specs)
    rate = data.draw(st.sampled_from([1.0, 10.0]), "bytes a second")
    costs = net.costs({}, rate)
    program, costs = with_algorithms(net.program, costs)
    fixed = data.draw(st.sets(st.integers(0, len(program.buffers) - 1)), "what cannot move")
    buffers = (
        dataclasses.replace(buffer, movable=b not in fixed)
        for b, buffer in enumerate(program.buffers)
    )
    program = dataclasses.replace(program, buffers=tuple(buffers))
    outcome = planned(name, program, between(program, share), costs)
    if isinstance(outcome, Infeasible):
        assert isinstance(planned(name, program, outcome.minimum_peak, costs), Plan)
    planned(name, program, None, costs)


@pytest.mark.parametrize("name", ["auto", "recompute"])
def test_recomputation_passes_through_no_effect(name):
    b = Builder()
    x, p, q = b.input(10), b.input(15), b.input(16)
    noisy = b.step([x, p], 11, pure=False)
    y = b.step([noisy, p], 15)
    loss = b.step([y], 1)
    g = b.step([loss, noisy], 11, BACKWARD)
    new_q = b.step([b.step([g], 16, BACKWARD), q], 16, UPDATE)
    h = b.step([g], 3, BACKWARD)
    new_p = b.step([b.step([h], 15, BACKWARD), p, y], 15, UPDATE)
    program = b.program([loss, new_q, new_p], [(q, new_q), (p, new_p)])
    for budget in range(program.resident_nbytes, between(program, 1)):
        planned(name, program, budget)


@pytest.mark.parametrize("name", ["auto", "recompute"])
def test_recomputation_reads_no_overwritten_input(name):
    b = Builder()
    p, x = b.input(10), b.input(2)
    h = b.step([x, p], 20)  # needs the old p
    k = b.step([h], 16)
    loss = b.step([k], 1)
    g = b.step([loss], 10, BACKWARD)
    new = b.step([g, p], 10, UPDATE)
    other = b.step([g], 30, BACKWARD)
    out = b.step([other], 2, BACKWARD)
    last = b.step([out, k], 2, BACKWARD)
    program = b.program([new, last], [(p, new)])
    for budget in range(program.resident_nbytes, between(program, 1)):
        planned(name, program, budget)


@pytest.mark.parametrize("name", ["auto", "recompute"])
def test_plans_are_valid_with_effects_and_donation(name):
    @settings(some, max_examples=25)
    @given(program=programs(), share=st.floats(0, 1.1))
    def check(program, share):
        planned(name, program, between(program, share))

    check()


@some
@given(program=programs(), share=st.floats(0, 1.1))
def test_keep_keeps_the_traced_order(program, share):
    plan = planned("keep", program, None)
    assert plan.order == tuple(range(len(program.steps))) and not plan.fenced
    budget = between(program, share)
    outcome = planned("keep", program, budget)
    assert isinstance(outcome, Infeasible) == (plan.predicted_peak > budget)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_minimum_peak_is_reached(name, shape):
    program = SHAPES[shape]
    outcome = planned(name, program, program.resident_nbytes)
    if isinstance(outcome, Infeasible):
        assert isinstance(planned(name, program, outcome.minimum_peak), Plan)


@pytest.mark.parametrize("name", ["auto", "recompute"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_minimum_peak_is_one_for_all_budgets(name, shape):
    program = SHAPES[shape]
    check_minimum_peaks(planned(name, program, between(program, n / 20)) for n in range(21))


@pytest.mark.parametrize("means", [("offload",), ("offload", "recompute")], ids="-".join)
@pytest.mark.parametrize("shape", SHAPES)
def test_so_is_the_minimum_peak_of_plans_that_move(means, shape):
    program = SHAPES[shape]
    costs = dataclasses.replace(flop_costs(program), link=Link(5.0, 5.0, 8.0))
    policy = POLICIES["auto"](allow=("order", *means))
    check_minimum_peaks(policy.plan(program, costs, between(program, n / 20)) for n in range(21))


def check_minimum_peaks(outcomes):
    """That some budget is infeasible, and that no minimum peak is 3 % above any peak reached."""
    minimum_peaks, reached = [], []
    for outcome in outcomes:
        if isinstance(outcome, Infeasible):
            minimum_peaks.append(outcome.minimum_peak)
        else:
            reached.append(outcome.predicted_peak)
    assert minimum_peaks and max(minimum_peaks) <= 1.03 * min(minimum_peaks + reached)


@pytest.mark.parametrize("name", POLICIES)
def test_never_a_higher_peak_than_keep(name):
    @settings(some, max_examples=100)
    @given(program=programs(pure=True), share=st.floats(0, 1.1))
    def check(program, share):
        keep = planned("keep", program, None).predicted_peak
        assert planned(name, program, None).predicted_peak <= keep
        assert isinstance(planned(name, program, keep), Plan)

    check()


@pytest.mark.parametrize("name", POLICIES)
def test_budget_below_arguments_and_outputs_names_the_largest(name):
    b = Builder()
    small, large = b.input(10), b.input(90)
    program = b.program([b.step([small, large], 5)])
    outcome = planned(name, program, 50)
    assert isinstance(outcome, Infeasible)
    assert (outcome.minimum_peak, outcome.at) == (105, program.steps[0].where)
    total, largest, *_ = outcome.holders.splitlines()
    assert "take 105 B" in total and largest.split() == ["90", "B", "b1"]


@pytest.mark.parametrize("name", POLICIES)
def test_program_without_steps(name):
    b = Builder()
    program = b.program([b.input(4)])
    assert planned(name, program, 8).order == ()
    assert planned(name, program, None).order == ()


@pytest.mark.parametrize("name", POLICIES)
def test_program_without_steps_over_the_budget(name):
    b = Builder()
    program = b.program([b.input(4)])
    outcome = planned(name, program, 7)
    assert isinstance(outcome, Infeasible)
    assert (outcome.minimum_peak, outcome.at) == (8, "the arguments and outputs alone")


def idle(program, base) -> list[Drop]:
    """What a plan may drop: each idle interval of what may be made again."""
    uses: dict[int, list[int]] = {}
    for position, s in enumerate(base):
        for b in (*program.steps[s].reads, *program.steps[s].writes):
            uses.setdefault(b, []).append(position)
    return [
        (b, n)
        for b, positions in uses.items()
        if not program.is_resident[b] and program.steps[program.producer[b]].reads
        for n in range(len(positions) - 1)
        if positions[n + 1] - positions[n] > 1
    ]


def every_choice(program, costs) -> list[tuple[int, float]]:
    """(peak, seconds) of every set of dropped intervals, in the canonical order."""
    base = canonical_order(program)
    drops = idle(program, base)
    results = []
    for mask in range(1 << len(drops)):
        chosen = {d for i, d in enumerate(drops) if mask >> i & 1}
        timeline = simulate(program, Execution(program, costs, base, chosen).order, costs)
        assert violations(program, plan_of(program, timeline.order)) == []
        results.append((timeline.peak, timeline.seconds))
    return results


def search_of(policy, program, share):
    """The plan's seconds over the best of every choice, None for Infeasible; or no search."""
    costs = flop_costs(program)
    if not 0 < len(idle(program, canonical_order(program))) <= 8:
        return "too large"
    found = every_choice(program, costs)
    lowest, highest = min(p for p, _ in found), max(p for p, _ in found)
    budget = int(lowest + share * (highest - lowest))
    best = min(seconds for peak, seconds in found if peak <= budget)
    outcome = policy.plan(program, costs, budget)
    return None if isinstance(outcome, Infeasible) else outcome.predicted_seconds / best


def searched(policy, share):
    """Seconds over the best of every choice, on random programs that are small enough for that."""
    ratios = []

    @settings(some, max_examples=150)
    @given(program=programs(layers=5, pure=True), share=share)
    def collect(program, share):
        ratios.append(search_of(policy, program, share))

    collect()
    found = [r for r in ratios if r != "too large"]
    assert len(found) > 20
    return found


def test_auto_is_the_best_of_every_choice():
    assert all(r is not None and r <= 1 for r in searched(POLICIES["auto"](), st.floats(0, 1)))


def test_greedy_search_is_close_to_the_best():
    found = searched(POLICIES["auto"](exhaustive=0), st.floats(0.125, 1))
    close = [r for r in found if r is not None and r <= 1.05]
    assert len(close) >= 0.95 * len(found)


@settings(some, max_examples=100)
@given(st.data())
def test_no_policy_is_fooled_by_a_random_order(data):
    """A valid order within the budget exists; `auto` never costs more than running it twice."""
    program = data.draw(programs(pure=True))
    costs = unit_costs(program)
    order = data.draw(orders(program, repeats=0))
    plan = POLICIES["auto"]().plan(program, costs, None)
    assert sorted(plan.order) == sorted(order)
