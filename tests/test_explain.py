"""explain: what a plan's summary says."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import plan_of
from test_moves import CHAIN, ORDER, costs_of

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.core.costs import Source
from vmem_jax.core.plan import Transfer
from vmem_jax.core.simulate import simulate
from vmem_jax.policy.base import at_the_peak
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


def test_a_peak_of_workspace_alone_lists_no_values():
    """Nothing but arguments and results is there while its only step runs."""
    step = lambda x: jnp.sort(x, axis=0)
    program = capture(jax.jit(step).trace(jnp.ones((8, 4))).jaxpr, ["x"], [False]).program
    [one] = program.steps
    program = dataclasses.replace(program, steps=(dataclasses.replace(one, workspace=2**20),))
    timeline = simulate(program, (0,), costs_of(program))
    found = at_the_peak(program, timeline)
    assert found.endswith("workspace 1.00 MiB") and "largest" not in found


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


def test_a_loop_is_one_group_an_iteration_and_all():
    """In the summary and in the trace; the plan's loop stacks less and computes more again."""
    length, rows, width = 12, 1024, 64

    def step(w, x):
        layer = lambda y, w: (y + jax.nn.gelu(y @ w[0]) @ w[1], None)
        loss = lambda w: jnp.square(jax.lax.scan(layer, x, w)[0]).mean()
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    w = shape(length, width, 4 * width), shape(length, 4 * width, width)
    found = vmem_jax.jit(step, budget=0.5, donate_argnums=0).explain(w, shape(rows, width))
    lines = [line for line in found.summary().splitlines() if f"{length} iterations" in line]
    each, total = zip(
        *(map(float, re.findall(r"([\d.]+) ms", line)) for line in lines), strict=True
    )
    assert total == pytest.approx([length * ms for ms in each], rel=0.01)
    assert sum(total) == pytest.approx(1e3 * found.seconds, rel=0.05)
    assert "scan (forward)" in lines[0] and "scan (backward)" in lines[1]
    stacked = 4 * rows * width * 5 // 2**10  # the carry, and what the second product reads
    assert (
        f"it stacks {stacked / 2**10:.2f} MiB each, {length * stacked / 2**10:.2f} MiB" in lines[0]
    )
    assert re.search(r"[1-9] of its \d+ steps compute forward values again", lines[1])
    spans = [
        e["args"] for e in found.trace()["traceEvents"] if e.get("args", {}).get("op") == "scan"
    ]
    assert [span["iterations"] for span in spans] == [length] * 2
    assert [1e3 * span["seconds an iteration"] for span in spans] == pytest.approx(each, abs=1e-3)
