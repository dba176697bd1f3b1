"""log: the lines of a search, and what they add up to."""

from __future__ import annotations

import pytest
from search_cases import (
    BUDGET,
    STAYING,
    STILL,
    Compiler,
    auto,
    family,
    find,
    over,
    variant,
)

from vmem_jax import POLICIES
from vmem_jax.search.log import Line, SearchLog, What


@pytest.mark.parametrize(
    "compile_plan, whats",
    [
        (Compiler(), [What.PLANNED, What.COMPILED]),
        (over(lambda plan: 3), [What.PLANNED, What.MISSED, What.PLANNED, What.COMPILED]),
    ],
    ids=["fits", "misses once"],
)
def test_what_is_planned_and_compiled_is_in_the_log(compile_plan, whats):
    log = SearchLog()
    found = find(variant(compile_plan, auto(STAYING), STILL), log=log)
    assert [line.what for line in log.lines] == whats
    assert [line.nbytes for line in log.of(What.COMPILED, What.MISSED)] == [
        attempt.need for attempt in found.attempts
    ]
    assert log.lines[-1].seconds == found.best.plan.predicted_seconds
    assert log.plans >= whats.count(What.PLANNED)


def test_what_is_not_predicted_to_fit_is_in_the_log():
    log = SearchLog()
    find(variant(Compiler(), POLICIES["recompute"](), STILL), budget=1, log=log)
    (line,) = log.of(What.OVER)
    assert line.nbytes > 1


def test_what_missed_tells_the_prediction_and_the_budget():
    log = SearchLog()
    find(variant(over(lambda plan: 2000), auto(STAYING), STILL), log=log)
    line = log.of(What.MISSED)[0]
    assert f"{BUDGET} B" in line.why and line.nbytes > BUDGET


def test_variants_are_told_apart():
    log = SearchLog()
    group = [
        family(variant(over(lambda plan: 1000), auto(STAYING), STILL, "first")),
        family(variant(None, auto(STAYING), STILL, "second")),
    ]
    find(group, log=log)
    assert [line.variant for line in log.of(What.COMPILED)] == ["second"]
    assert {line.variant for line in log.of(What.MISSED)} == {"first"}


def test_a_line_says_what_is_known_of_it():
    assert str(Line(What.DROPPED, "auto", why="refused")) == "auto: dropped: refused"
    said = str(Line(What.PLANNED, "auto in 4 sub-batches", 0.25, 3 * 2**20))
    assert "3.00 MiB" in said and "250.00 ms" in said


def test_techniques_that_are_skipped():
    log = SearchLog()
    log.add(What.SKIPPED, "offload", why="it is a test")
    log.add(What.PLANNED, "auto", 1.0, 1)
    assert log.skipped == {"offload": "it is a test"}
