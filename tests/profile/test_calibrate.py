"""Calibration on numbers made up here: known factors come back, and the error is that of the rest."""

import dataclasses

import pytest
from helpers import FORWARD, Builder

from vmem_jax.core.cards import CARDS, machine_for
from vmem_jax.core.costs import Source, analytic
from vmem_jax.core.machine import WRITTEN, Machine
from vmem_jax.profile.calibrate import StepClass, Timing, calibrate, class_of, costs_from

CONV, FUSED, PRODUCT = StepClass.CONVOLUTION, StepClass.FUSED, StepClass.PRODUCT
MACHINE = Machine("made up", {"": 1e9, "float32": 1e9}, 1e9, 1e-6, 10**9)


def program(ops):
    """One step for each (op, fusible), each twice as large as the one before."""
    b = Builder()
    x = b.input(1000)
    for i, (op, fusible) in enumerate(ops):
        x = b.step([x], 1000 << i, FORWARD, op=op, fusible=fusible, flops=100_000 << i)
    return b.program([x])


def test_a_known_factor_of_each_class_is_recovered():
    samples = [(CONV, s, 3.0 * s) for s in (1e-3, 2e-3, 5e-3)]
    samples += [(FUSED, s, 0.5 * s) for s in (1e-5, 7e-5)]
    found = calibrate(samples)
    assert found.factors == {CONV: pytest.approx(3.0), FUSED: pytest.approx(0.5)}
    assert found.error == pytest.approx(0.0, abs=1e-9)


def test_it_is_least_squares_in_log_space():
    found = calibrate([(CONV, 1.0, 1.0), (CONV, 1.0, 4.0)])
    assert found.factors[CONV] == pytest.approx(2.0)  # the geometric mean, not 2.5
    # each predicted from the other: 4 instead of 1, and 1 instead of 4
    assert found.error == pytest.approx((3.0 + 0.75) / 2)


def test_a_class_of_one_is_judged_by_the_other_classes():
    found = calibrate([(CONV, 1.0, 2.0), (PRODUCT, 1.0, 2.0), (FUSED, 1.0, 4.0)])
    assert found.error == pytest.approx(2**0.5 - 1)


def test_a_class_without_a_sample_is_that_of_the_others_where_these_are_many():
    """One pooling at half of its roofline must not make every convolution twice as fast."""
    default = lambda count: calibrate([(FUSED, 1.0, 0.5)] * count).default
    assert default(0) == 1.0 and 0.85 < default(1) < 0.95
    assert default(1) > default(10) and default(500) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("samples", [[], [(CONV, 1.0, 2.0)]])
def test_too_little_to_tell_an_error(samples):
    assert calibrate(samples).error is None


def test_what_is_timed_alone_is_transposed_besides():
    p = program([("dot_general", False)] * 2)
    steps = tuple(dataclasses.replace(step, behind=4000) for step in p.steps)
    roofline = analytic(p, MACHINE).seconds
    elements = 500  # of float32, each read and written
    behind = max(4000 / MACHINE.bandwidth, elements * WRITTEN / MACHINE.flops[""])
    timings = {"a": Timing(3 * roofline[0], Source.MEASURED)}
    costs = costs_from(dataclasses.replace(p, steps=steps), MACHINE, ("a", ""), [], timings)
    assert costs.seconds == pytest.approx([3 * seconds + behind for seconds in roofline])


def test_costs_say_where_each_number_comes_from():
    p = program([("conv_general_dilated", False)] * 2 + [("add", True), ("dot_general", False)])
    roofline = analytic(p, MACHINE).seconds
    timings = {"a": Timing(2 * roofline[0], Source.MEASURED), "d": Timing(9.0, Source.SCALED)}
    costs = costs_from(p, MACHINE, ("a", "b", "", "d"), [], timings)
    assert costs.sources == (
        Source.MEASURED, Source.CALIBRATED, Source.CALIBRATED, Source.SCALED
    )  # fmt: skip
    assert costs.seconds == pytest.approx(
        (2 * roofline[0], 2 * roofline[1], 2 ** (1 / 6) * roofline[2], 9.0)
    )
    assert costs.link == analytic(p, MACHINE).link


def test_neighbours_share_what_they_take_together():
    p = program([("conv_general_dilated", False), ("add", True), ("reduce_sum", True)])
    roofline = analytic(p, MACHINE).seconds
    alone = Timing(3 * roofline[0], Source.MEASURED)
    weights = (3 * roofline[0], roofline[1], roofline[2])
    together = Timing(0.5 * sum(weights), Source.MEASURED)
    costs = costs_from(p, MACHINE, ("a", "", ""), [((0, 1, 2), "g")], {"a": alone, "g": together})
    assert costs.seconds == pytest.approx([0.5 * w for w in weights])
    assert set(costs.sources) == {Source.MEASURED}


def test_neighbours_that_were_not_timed_take_what_such_steps_took_elsewhere():
    p = program([("dot_general", False), ("add", True), ("dot_general", False), ("add", True)])
    roofline = analytic(p, MACHINE).seconds
    timings = {
        "a": Timing(roofline[0], Source.MEASURED),
        "g": Timing(0.25 * (roofline[0] + roofline[1]), Source.MEASURED),
    }
    groups = [((0, 1), "g"), ((2, 3), "h")]
    costs = costs_from(p, MACHINE, ("a", "", "c", ""), groups, timings)
    assert costs.seconds[3] == pytest.approx(0.25 * roofline[3])
    assert costs.sources == (Source.MEASURED,) * 2 + (Source.CALIBRATED,) * 2


def test_without_measurements_it_is_the_roofline_and_says_so():
    p = program([("add", True), ("dot_general", False)])
    costs = costs_from(p, MACHINE, ("", "b"), [((0,), "g")], {})
    assert costs.seconds == pytest.approx(analytic(p, MACHINE).seconds)
    assert set(costs.sources) == {Source.ROOFLINE} and costs.error is None


def test_a_folded_step_costs_nothing_of_its_own():
    p = program([("rev", True), ("conv_general_dilated", False)])
    timings = {"b": Timing(1.0, Source.MEASURED)}
    costs = costs_from(p, MACHINE, ("", "b"), [], timings, frozenset({0}))
    assert costs.seconds == (0.0, 1.0)


def test_a_part_that_repeats_counts_once_in_the_calibration():
    p = program([("sort", False)] * 4)
    seconds = analytic(p, MACHINE).seconds
    timings = {
        "a": Timing(2 * seconds[0], Source.MEASURED),
        "b": Timing(8 * seconds[3], Source.MEASURED),
    }
    costs = costs_from(p, MACHINE, ("a", "a", "", "b"), [], timings)
    assert costs.seconds[2] == pytest.approx(4 * seconds[2])


@pytest.mark.parametrize(
    "op, fusible, expected",
    [
        ("conv_general_dilated", False, CONV),
        ("dot_general", False, PRODUCT),
        ("reduce_sum", True, FUSED),
        ("argmax", True, FUSED),
        ("max", True, FUSED),
        ("sort", False, StepClass.OTHER),
    ],
)
def test_classes(op, fusible, expected):
    assert class_of(program([(op, fusible)]).steps[0]) is expected


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_shipped_defaults_are_complete(name):
    machine = CARDS[name].machine
    assert machine_for({"h200": "NVIDIA H200", "cpu": "cpu"}[name]) is machine
    for rate in (machine.link_out, machine.link_in, machine.link_both, machine.pinning):
        assert rate > 0
    assert machine.link_both >= max(machine.link_out, machine.link_in)


def test_convolutions_have_a_rate_of_their_own():
    p = program([("conv_general_dilated", False), ("dot_general", False)])
    machine = dataclasses.replace(MACHINE, convolutions={"float32": 1e6})
    assert machine.seconds(p.steps[0]) == pytest.approx(0.1 + 1e-6)
    assert machine.seconds(p.steps[1]) == MACHINE.seconds(p.steps[1])
