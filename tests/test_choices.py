"""benchmarks/choices.py: which ways are described and timed, and what of them is compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import choices


def row(way, gib, ms=None):
    figures = {} if ms is None else {"predicted_ms": ms, "predicted_gib": gib}
    return {"way": way, "gib": gib, **figures}


PLAIN = row("plain", 10.0)
AUTO = [row(b, g, ms) for b, g, ms in [("1.0", 9, 100), ("0.5", 5, 110), ("0.33", 3.3, 130)]]
NONE = [{"way": way, "error": "BudgetError"} for way in ("0.25", "0.2", "exact*8")]
EXACT = [row("exact", 9, 100), row("exact*2", 6, 105), row("exact*4", 4, 140)]
FIRST = [PLAIN, *AUTO, *NONE, *EXACT]
AGAIN = [row("recompute@0.5", 5, 120), row("recompute@0.33*2", 3, 180)]


def test_recomputation_is_described_where_exact_residuals_do_not_fit():
    assert choices.to_describe([])[0] == "plain" and "exact*8" in choices.to_describe([])
    assert choices.to_describe(FIRST[:5]) == ["0.2", "exact", "exact*2", "exact*4", "exact*8"]
    asked = choices.to_describe(FIRST)
    assert "recompute@0.5" in asked and "recompute@0.5*2" in asked
    assert "recompute@0.5*4" not in asked and "recompute@0.33*4" in asked
    assert not any(way.startswith("recompute@1.0") or way.endswith("*8") for way in asked)
    assert choices.to_describe([*FIRST, *(row(way, 1, 1) for way in asked)]) == []


def test_what_is_near_or_nearest_is_timed_and_one_plan_once():
    """`exact` is what `auto` chose for all of the memory; 180 ms are the only way for a third."""
    timed = choices.to_time([*FIRST, *AGAIN])
    assert timed == ["plain", "1.0", "exact*2", "0.5", "recompute@0.5", "0.33", "recompute@0.33*2"]


def test_auto_is_compared_with_the_fastest_that_fits():
    ms = {"plain": 100, "1.0": 90, "exact*2": 95, "0.5": 99, "recompute@0.5": 96, "0.33": 120}
    found = choices.choices([*FIRST, *AGAIN], [{"way": way, "ms": x} for way, x in ms.items()])
    whole, half, third = found
    assert (whole["of_plain"], whole["best"], whole["of_best"]) == (0.9, "exact", 1.0)
    assert half["best"] == "recompute@0.5" and half["of_best"] == pytest.approx(99 / 96)
    assert third["count"] == 0 and third["best_of_plain"] is None


def test_only_ways_of_one_process_are_compared():
    """A second one, in which all takes twice as long, timed more ways for a half."""
    first = {"plain": 100, "1.0": 90, "0.5": 99, "recompute@0.5": 96}
    second = {"plain": 200, "0.5": 200, "recompute@0.5": 220, "exact*4": 210}
    timed = [{"way": way, "ms": x} for run in (first, second) for way, x in run.items()]
    whole, half = choices.choices([*FIRST, *AGAIN], timed)
    assert whole["of_plain"] == 0.9
    assert (half["of_plain"], half["best"], half["count"]) == (1.0, "exact*4", 2)
    assert half["of_best"] == pytest.approx(200 / 210)
