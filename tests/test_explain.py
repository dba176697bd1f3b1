"""explain: what a plan's summary says, on programs drawn by hand."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import plan_of
from test_moves import CHAIN, ORDER, costs_of

from vmem_jax.core.costs import Source
from vmem_jax.core.plan import Transfer
from vmem_jax.core.simulate import simulate
from vmem_jax.report.explain import Explanation, explain

COSTS = costs_of(CHAIN)


def explained(costs=COSTS, order=ORDER, **changes) -> Explanation:
    plan = plan_of(CHAIN, order, **changes)
    return explain(CHAIN, costs, plan, budget=None, plain_need=100, compiled_need=50)


def test_what_is_away_at_the_peak_does_not_hold_bytes_there():
    """Layer 1's output, 10 bytes, waits in host memory from position 4 to 13; the peak is between."""
    kept, moved = explained(), explained(transfers=(Transfer(2, 3, 4, 13, 14),))
    assert moved.timeline.peak == kept.timeline.peak - 10
    assert 4 <= moved.timeline.peak_at < 13
    assert "activation 90 B" in kept.holders and "activation 80 B" in moved.holders
    assert simulate(CHAIN, ORDER, COSTS).peak == kept.timeline.peak


def test_shares_are_of_the_seconds_of_all_that_runs():
    steps = len(CHAIN.steps)
    sources = (Source.MEASURED, Source.SCALED, *[Source.CALIBRATED] * (steps - 2))
    costs = dataclasses.replace(COSTS, sources=sources, error=0.125)
    again = (*range(9), 0, *range(9, steps))  # the measured step runs twice
    found = explained(costs, again)
    assert found.shares == {
        Source.MEASURED: pytest.approx(2 / (steps + 1)),
        Source.SCALED: pytest.approx(1 / (steps + 1)),
        Source.CALIBRATED: pytest.approx((steps - 2) / (steps + 1)),
    }
    text = found.summary()
    assert "times are 11% measured, 6% scaled, 83% calibrated" in text
    assert "median error of the calibration 12%" in text


def test_a_roofline_is_called_one():
    found = explained()
    assert found.shares == {Source.ROOFLINE: pytest.approx(1)}
    assert "a roofline's, nothing was measured" in found.summary()
    unknown = dataclasses.replace(COSTS, sources=(Source.MEASURED,) * len(CHAIN.steps))
    assert "times are 100% measured" in explained(unknown).summary()
    assert "error" not in explained(unknown).summary()
