"""vDNN on the examples of its paper, drawn by hand: exact schedules, and what is live in them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import pytest
from helpers import chain, unit_costs
from networks import CONV, FORK, Spec, network, with_algorithms

from vmem_jax import VDNN, LayersError
from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import Costs, Link, analytic
from vmem_jax.core.layers import LayerKind
from vmem_jax.core.plan import Transfer
from vmem_jax.core.planned import simulate_plan
from vmem_jax.core.simulate import live_at
from vmem_jax.core.validate import violations
from vmem_jax.models import job
from vmem_jax.policy import Infeasible
from vmem_jax.policy.layerwise import Walk
from vmem_jax.policy.order import lower_order
from vmem_jax.policy.vdnn import find_prefetch_layer

DATA = Spec("other", 8)
"""What comes before the first layer: the batch itself is an argument, which no plan moves."""

LINEAR = network([DATA, CONV, CONV, CONV, CONV])


def planned(net, policy, costs=None, budget=None):
    costs = costs or net.costs({}, rate=8.0)
    plan = policy.plan(net.program, costs, budget)
    return plan, checked(net, plan, costs)


def checked(net, plan, costs):
    """The timeline of `plan`, which is valid."""
    assert violations(net.program, plan) == []
    return simulate_plan(net.program, plan, costs)


def live_feature_maps(net, plan, position):
    """The layers whose Y is live while the step at `position` runs."""
    live = live_at(net.program, plan.order, position, plan.transfers)
    return [n for n, b in enumerate(net.y) if b in live]


def test_figure_3_forks_wait_for_the_last_consumer_and_joins_move_all_they_read():
    plan, _ = planned(FORK, VDNN("all"))
    moved = {t.buffer: t for t in plan.transfers}
    y, at = FORK.y, plan.order.index
    # layers 2 and 3 read y[0]: it leaves with the one that is computed last
    last = max(FORK.forward[1], FORK.forward[2], key=at)
    assert moved[y[0]].start == at(last) and moved[y[0]].gone == at(last) + 1
    first = min(FORK.backward[1], FORK.backward[2], key=at)
    assert moved[y[0]].back == at(first)
    fourth = at(FORK.forward[3])
    assert (moved[y[2]].start, moved[y[2]].gone) == (fourth, fourth + 1)
    # 2 and 4 are joined by the last layer, whose inputs stay
    assert set(moved) == {y[0], y[2]}


def test_figure_7_forwards_only_the_layer_that_is_computed_is_there():
    plan, _ = planned(LINEAR, VDNN("all"))
    for n in range(1, 5):
        assert live_feature_maps(LINEAR, plan, LINEAR.forward[n]) == [n - 1, n]


def test_figure_8_backwards_what_later_layers_left_is_released():
    net = network([DATA, *[Spec("conv", 8, reads="xy")] * 4])
    plan, _ = planned(net, VDNN("all"))
    for n in (3, 2):
        live = live_at(net.program, plan.order, net.backward[n], plan.transfers)
        assert live_feature_maps(net, plan, net.backward[n])[-1] == n
        gradients = [b for b in live if net.program.buffers[b].kind.value == "gradient"]
        step = net.program.steps[net.backward[n]]
        assert set(gradients) == {*step.writes, *(b for b in step.reads if b in gradients)}
        # X of this layer, and of the one before, which is prefetched meanwhile
        assert live_feature_maps(net, plan, net.backward[n]) == [n - 2, n - 1, n]


def test_figure_9_wasted_time_where_a_copy_outlasts_its_layer():
    net = network([DATA, CONV, CONV, CONV])
    one, two, three = net.forward[1:]
    copy = 8.0  # seconds
    costs = net.costs({1: (5, 9), 2: (9, 5), 3: (9, 9)}, rate=1.0)
    plan, timeline = planned(net, VDNN("conv"), costs)
    off1, off2 = plan.transfers
    assert off1 == Transfer(net.y[0], one, two, net.backward[2], net.backward[1])
    loss = net.backward[3] - 1  # the backward pass of the last layer begins with it
    assert off2 == Transfer(net.y[1], two, three, loss, net.backward[2])
    assert timeline.start[two] == timeline.start[one] + copy  # stalled by OFF(1)
    assert timeline.start[three] == timeline.start[two] + 9  # OFF(2) is hidden
    assert timeline.start[net.backward[2]] == timeline.start[loss] + 1 + 9  # and PRE(2)
    assert timeline.start[net.backward[1]] == timeline.start[net.backward[2]] + copy  # not PRE(1)
    assert timeline.stalls == (3.0 + 3.0, 0.0)


CONVOLUTION, POOLING, FULLY = LayerKind.CONVOLUTION, LayerKind.POOLING, LayerKind.FULLY_CONNECTED


@pytest.mark.parametrize(
    "current, offloaded, prefetched, found",
    [
        (6, {1, 4}, (), 4),  # past the pool, up to the closest convolution
        (6, {1, 4}, {4}, None),  # that ends the search, fetched or not
        (5, {1, 3, 4}, {4}, None),
        (4, {1, 3}, (), 3),
        (3, {1, 2}, (), 2),
        (2, {0, 1}, {1}, None),
        (6, {0}, (), None),
        (1, {0}, (), 0),
        (0, {0}, (), None),
    ],
)
def test_figure_10_the_search_ends_at_the_closest_convolution(
    current, offloaded, prefetched, found
):
    kinds = [CONVOLUTION, CONVOLUTION, POOLING, CONVOLUTION, CONVOLUTION, POOLING, FULLY]
    ahead = [(kinds[n], {n} & offloaded) for n in reversed(range(current))]
    assert find_prefetch_layer(ahead, prefetched) == ([] if found is None else [found])


def prefetched_by_definition(program, walk, moved):
    """Where each of `moved`, buffer -> first use backwards, is prefetched: section III-B, told in the
    order in which the steps run. Buffers that are not found are left out."""
    visits = [*walk.backward, (math.inf, None)]
    windows = [(begin, visits[i + 1][0], n) for i, (begin, n) in enumerate(walk.backward)]
    found = {}
    for begin, _, _ in windows:
        for later, end, n in windows:
            if later <= begin:
                continue
            here = [b for b, use in moved.items() if later <= use < end and b not in found]
            if here:
                found.update(dict.fromkeys(here, begin))
                break
            if walk.layers[n].kind is LayerKind.CONVOLUTION:
                break
    return found


def branches(visits=None):
    """DATA, a stem, two branches of two convolutions, a join and a last convolution."""
    stem, left, right = [DATA, CONV], [Spec("conv", 8, (1,)), CONV], [Spec("conv", 8, (1,)), CONV]
    return network([*stem, *left, *right, Spec("other", 8, (3, 5)), CONV], visits=visits)


@pytest.mark.parametrize(
    "visits, first", [(None, 2), ((7, 6, 3, 2, 5, 4, 1, 0), 5)], ids=["first branch", "second"]
)
def test_forks_are_searched_in_the_order_of_the_backward_pass(visits, first):
    """JAX may go back through the first branch first, so that layer 5 comes after layer 2."""
    net = branches(visits)
    program, costs = net.program, net.costs({}, rate=8.0)
    order = lower_order(program, costs)
    assert min((2, 5), key=lambda n: order.index(net.backward[n])) == first
    for offload in ("conv", "all"):
        plan, _ = planned(net, VDNN(offload))
        moved = {t.buffer: t.back for t in plan.transfers}
        expected = prefetched_by_definition(program, Walk(program, order), moved)
        assert {t.buffer: t.fetch for t in plan.transfers} == expected
        assert len(moved) >= 3 and all(t.fetch < t.back for t in plan.transfers)


def test_of_googlenet_nothing_is_fetched_on_demand():
    pytest.importorskip("flax")
    work = job("googlenet", batch=8, dtype="bfloat16")
    program = capture(jax.jit(work.step).trace(work.state_shapes(), work.batch).jaxpr).program
    costs = analytic(program, CARDS["h200"].machine)
    walk = Walk(program, lower_order(program, costs))
    forwards = [n for _, n in walk.backward]
    assert sum(a < b for a, b in itertools.pairwise(forwards)) > 5  # branches out of order
    for offload in ("conv", "all"):
        transfers = VDNN(offload).plan(program, costs, None).transfers
        assert len(transfers) > 30 and all(t.fetch < t.back for t in transfers)


def test_conv_moves_what_convolutions_read_and_all_moves_the_rest_too():
    net = network([DATA, CONV, Spec("pool", 4), CONV, Spec("act", 8), CONV, Spec("fc", 2)])
    buffers = lambda offload: {t.buffer for t in planned(net, VDNN(offload))[0].transfers}
    y = net.y
    assert buffers("none") == set()
    assert buffers("conv") == {y[0], y[2], y[4]}
    assert buffers("all") == {y[0], y[1], y[2], y[3], y[4]}


def with_choices():
    """LINEAR with three algorithms for each forward convolution."""
    program, costs = with_algorithms(LINEAR.program, LINEAR.costs({}, rate=8.0))
    return dataclasses.replace(LINEAR, program=program), costs


@pytest.mark.parametrize(
    "policy, workspaces, moves",
    [
        (VDNN("all", "m"), [0] * 4, 3),
        (VDNN("all", "p"), [30] * 4, 3),
        (VDNN("none", "m"), [0] * 4, 0),
        (VDNN("dyn"), [30] * 4, 0),
    ],
)
def test_algorithms_without_a_budget(policy, workspaces, moves):
    net, costs = with_choices()
    plan, _ = planned(net, policy, costs)
    assert [way.workspace for _, way in plan.convolutions] == workspaces
    assert len(plan.transfers) == moves


def test_dyn_downgrades_where_it_must_and_takes_the_passes_in_turn():
    """With less and less memory: nothing moved, then moved, then slower algorithms, then none."""
    net, costs = with_choices()
    seen = []
    _, free = planned(net, VDNN("dyn"), costs)
    for budget in range(free.peak, 0, -1):
        found = VDNN("dyn").plan(net.program, costs, budget)
        if isinstance(found, Infeasible):
            least = planned(net, VDNN("all", "m"), costs)[1].peak
            assert found.minimum_peak == least == budget + 1
            assert found.plan.transfers
            break
        assert checked(net, found, costs).peak <= budget
        seen.append((bool(found.transfers), sum(way.workspace for _, way in found.convolutions)))
    assert seen == sorted(seen, key=lambda s: (s[0], -s[1]))
    assert {(False, 120), (True, 120)} <= set(seen)
    assert any(0 < workspace < 120 for moved, workspace in seen if moved)  # the greedy passes


def test_greedy_gives_each_layer_the_fastest_that_fits_where_it_stands():
    net, costs = with_choices()
    tight = planned(net, VDNN("all", "m"), costs)[1].peak + 3
    plan, _ = planned(net, VDNN("dyn"), costs, tight)
    chosen = [way.workspace for _, way in plan.convolutions]
    assert set(chosen) <= {0, 10} and 10 in chosen


def test_without_a_link_nothing_moves():
    program = chain(4)
    assert VDNN("all").plan(program, unit_costs(program), None).transfers == ()


LINKED = Link(1.0, 1.0, 2.0)


def refused(policy, program, budget=None):
    costs = Costs("unit", (1.0,) * len(program.steps), LINKED)
    with pytest.raises(LayersError) as error:
        policy.plan(program, costs, budget)
    return str(error.value)


def test_no_convolution_to_move_the_input_of():
    says = refused(VDNN("conv"), chain(4))
    assert "policy `vdnn` moves the inputs of convolutions" in says
    assert "of the 5 layers of this step none is one: other" in says and "offload='all'" in says


def test_no_backward_pass():
    steps = LINEAR.program.steps[:5]
    program = dataclasses.replace(LINEAR.program, steps=steps, outputs=(LINEAR.y[-1],))
    says = "5 layers and no backward pass. Put `jax.grad`"
    for policy in VDNN("all"), VDNN("conv"):
        assert says in refused(policy, program)
    assert says in VDNN().plan(program, unit_costs(program), 25).lacks  # it may compile to less
    assert VDNN().plan(program, unit_costs(program), 1000).transfers == ()


@pytest.mark.parametrize("options", [{"offload": "some"}, {"algorithms": "fast"}])
def test_unknown_options(options):
    with pytest.raises(ValueError, match="there is"):
        VDNN(**options)
