"""vDNN++ on the examples of its paper: waits that vDNN has and it has not."""

from __future__ import annotations

import pytest
from helpers import unit_costs
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import Spec, network

from vmem_jax import VDNN, LayersError, VDNNpp
from vmem_jax.core.heap import heap_nbytes
from vmem_jax.core.pool import fragmentation
from vmem_jax.core.simulate import simulate
from vmem_jax.core.validate import peak_by_definition, violations
from vmem_jax.policy import Infeasible

DATA = Spec("other", 62)
LAYER = Spec("conv", 62)  # bytes: a second each, so a transfer takes 62


def planned(net, policy, costs, budget=None):
    plan = policy.plan(net.program, costs, budget)
    assert violations(net.program, plan) == []
    timeline = simulate(net.program, plan.order, costs, plan.transfers)
    assert plan.predicted_peak == peak_by_definition(net.program, plan.order, plan.transfers)
    return plan, timeline


def test_figures_4_and_8_the_next_layer_does_not_wait():
    """Table I: a pool of 3 ms and a transfer of 62 between convolutions of 80 and 200."""
    net = network([DATA, LAYER, Spec("pool", 62), LAYER, LAYER])
    seconds = {1: (80.0, 80.0), 2: (3.0, 3.0), 3: (200.0, 3.0), 4: (80.0, 80.0)}
    costs = net.costs(seconds, rate=1.0)
    begins = {}
    for policy in (VDNN("all"), VDNNpp("all")):
        # as much memory as the later release takes
        _, timeline = planned(net, policy, costs, 1000)
        begins[policy.name] = lambda s, timeline=timeline: timeline.start[timeline.order.index(s)]
    vdnn, vdnnpp = begins["vdnn"], begins["vdnnpp"]
    _, conv1, pool, conv2, conv3 = net.forward
    for start in (vdnn, vdnnpp):
        assert start(pool) == start(conv1) + 80  # longer than its offload
    assert vdnn(conv2) == vdnn(pool) + 62  # Figure 4: stalled until the offload is complete
    assert vdnnpp(conv2) == vdnnpp(pool) + 3  # Figure 8: as soon as the pool is done
    assert vdnnpp(conv3) == vdnnpp(conv2) + 200
    back = net.backward
    # while conv2 computes backwards the pool's input is fetched: only the pool's backward waits
    assert vdnn(back[2]) == vdnn(back[3]) + 62
    # while the pool does, conv1's: vDNN waits at its end, vDNN++ as well, for conv1 reads it next
    assert vdnn(back[1]) == vdnn(back[2]) + 62 == vdnn(back[3]) + 124
    assert vdnnpp(back[1]) <= vdnnpp(back[3]) + 124


def test_a_copy_is_waited_for_by_the_layer_that_reads_it():
    """Backwards vDNN stalls at the end of the layer that prefetches, also for what is read later."""
    specs = [DATA, LAYER, Spec("pool", 4, reads="y"), Spec("conv", 4), Spec("conv", 4)]
    net = network(specs)
    # the pool's input does not move, so conv1's is fetched while conv2 goes backwards
    costs = net.costs({3: (90.0, 3.0), 2: (1.0, 50.0)}, rate=1.0)
    _, waits = planned(net, VDNN("conv"), costs)
    _, goes_on = planned(net, VDNNpp("conv"), costs)
    at = waits.order.index
    between = lambda t: t.start[at(net.backward[2])] - t.start[at(net.backward[3])]
    assert between(waits) > between(goes_on) == 3.0
    assert goes_on.seconds < waits.seconds


def test_the_peak_stays_vdnns_and_compute_waits_for_memory():
    """Slow copies: each output finds memory only when an earlier input is out."""
    net = network([DATA, *(Spec("conv", nbytes) for nbytes in (50, 70, 62))])
    costs = net.costs({}, rate=20.0)
    before, slow = planned(net, VDNN("all"), costs)
    after, fast = planned(net, VDNNpp("all"), costs)
    assert after.predicted_peak == before.predicted_peak
    assert after.predicted_seconds < before.predicted_seconds
    wider, faster = planned(net, VDNNpp("all"), costs, before.predicted_peak + 62)
    assert wider.predicted_peak <= before.predicted_peak + 62
    assert faster.seconds <= fast.seconds <= slow.seconds
    gone = lambda plan: [t.gone for t in plan.transfers]
    assert all(a >= b for a, b in zip(gone(after), gone(before), strict=True))
    assert gone(after) != gone(before)
    turn = net.backward[-1] - 1  # the gradient of the loss
    assert max(gone(wider)) <= turn  # all is released before the backward pass


ORDERS = st.lists(
    st.sampled_from(
        [LAYER, Spec("conv", 33), Spec("pool", 20, reads="y"), Spec("act", 33), Spec("conv", 7)]
    ),
    min_size=3,
    max_size=9,
)


@settings(max_examples=100, deadline=None)
@given(ORDERS, st.sampled_from(["all", "conv", "dyn"]), st.floats(1.0, 60.0), st.floats(0.0, 1.2))
def test_it_never_needs_more_than_vdnn_or_the_budget_on_the_heap(specs, offload, rate, share):
    """The paper holds its peak to vDNN's; here the heap counts, whose gaps differ."""
    net = network([DATA, Spec("conv", 62), *specs])
    costs = net.costs({}, rate=rate)
    need = lambda found: heap_nbytes(net.program, found.order, found.transfers)
    free = VDNN("none").plan(net.program, costs, None).predicted_peak
    budget = int(share * free)
    theirs, ours = (policy(offload).plan(net.program, costs, budget) for policy in (VDNN, VDNNpp))
    if isinstance(ours, Infeasible):
        assert isinstance(theirs, Infeasible) and ours.minimum_peak <= theirs.minimum_peak
        ours, theirs = ours.plan, theirs.plan
    if offload != "dyn":  # else it may have another pass, aconv
        assert need(ours) <= max(need(theirs), budget)
        assert ours.predicted_seconds <= theirs.predicted_seconds


@pytest.mark.parametrize(
    "specs, rate, later",
    [
        ([("conv", 40), ("pool", 20), ("act", 33)], 5.0, 0),
        ([("pool", 60), ("conv", 8), ("act", 33), ("act", 33)], 10.0, 1),
    ],
    ids=["before", "behind"],
)
def test_section_5_of_both_orders_the_one_that_the_heap_has_room_for(specs, rate, later):
    """Space for what is prefetched is taken before, or a step behind, that of the derivative."""
    net = network([DATA, LAYER, *(Spec(*spec) for spec in specs)])
    costs = net.costs({}, rate=rate)
    before, _ = planned(net, VDNN("all"), costs)
    after, _ = planned(net, VDNNpp("all"), costs)
    fetched = lambda plan: {t.buffer: t.fetch for t in plan.transfers}
    assert max(fetched(after)[b] - at for b, at in fetched(before).items()) == later
    assert after.predicted_seconds < before.predicted_seconds


def test_section_2_every_second_convolution():
    net = network([DATA, *[LAYER] * 6])
    moved = lambda offload: {
        t.buffer for t in planned(net, VDNNpp(offload), net.costs({}))[0].transfers
    }
    y = net.y
    assert moved("conv") == {y[0], y[1], y[2], y[3], y[4]}
    assert moved("aconv") == {y[0], y[2], y[4]}
    assert moved("none") == set()


def test_section_5_alternate_offload_hides_behind_two_layers():
    """Forwards nothing waits where two layers take as long as the offload of one of them."""
    net = network([DATA, *[LAYER] * 6])
    costs = net.costs(dict.fromkeys(range(1, 7), (40.0, 40.0)), rate=1.0)

    def stalled(policy):
        waits = planned(net, policy, costs, 1000)[1].waits
        return sum(w.end - w.begin for w in waits if w.direction == "out")

    assert stalled(VDNNpp("aconv")) == 0
    assert stalled(VDNNpp("conv")) == 5 * 62 - 6 * 40  # at the turn
    assert stalled(VDNN("conv")) == 5 * (62 - 40)


def test_dyn_takes_aconv_before_conv():
    net = network([DATA, *[LAYER] * 6])
    costs = net.costs({}, rate=1.0)
    free = planned(net, VDNNpp(), costs)[0].predicted_peak
    counts = [len(planned(net, VDNNpp(), costs, free - 62 * n)[0].transfers) for n in range(4)]
    assert counts == [0, 3, 3, 5]


def test_table_5_pools_of_a_plan():
    """Every pool serves the plan, none is smaller than what is live at once."""
    net = network([DATA, LAYER, Spec("pool", 20), Spec("conv", 33), Spec("act", 33), LAYER])
    for policy in (VDNN("all"), VDNNpp("all"), VDNNpp("aconv"), VDNNpp("none")):
        plan, timeline = planned(net, policy, net.costs({}))
        found = fragmentation(net.program, plan.order, plan.transfers)
        assert len(found.pools) == 4 and found.nbytes >= found.aggregate
        assert found.aggregate == timeline.peak - net.program.resident_nbytes


def test_layers_that_are_missing():
    net = network([DATA, Spec("pool", 8), Spec("pool", 8)])
    for offload in ("conv", "aconv"):
        with pytest.raises(LayersError, match="policy `vdnnpp` moves the inputs of convolutions"):
            VDNNpp(offload).plan(net.program, unit_costs(net.program), None)
    with pytest.raises(ValueError, match="there is all, conv, aconv, none, dyn"):
        VDNNpp("some")
