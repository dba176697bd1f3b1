"""`auto` beside the systems of the papers, at every budget of the core tables, as the rows say."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("flax")
ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import manifest  # noqa: E402
import papers  # noqa: E402
from manifest import SYSTEMS, Case  # noqa: E402
from records import LEAST_OF, Record  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
COMPILED = RESULTS / "papers_h200_compiled.jsonl"
TABLES = [table for table in map(manifest.load, manifest.names()) if table.runs]

NOISE = 0.022
"""Share by which medians of the same step differ from one process to another: cuDNN's kernels are
tuned anew for each."""

Budgets = dict[Case, list[Case]]


def budgets(cases) -> Budgets:
    """`auto` at each budget that a system of the papers has among `cases`, and those systems."""
    found: Budgets = {}
    for case in cases:
        system, _, options = case.variant.partition("?")
        if system not in SYSTEMS or case.asked == "none":
            continue
        if case.asked == "least" and options:
            continue  # what a part of a system needs at the least is no budget of a table
        asked = LEAST_OF + system if case.asked == "least" else case.asked
        auto = Case(case.model, case.batch, case.dtype, "auto", asked)
        found.setdefault(auto, []).append(case)
    return found


CORE = budgets(case for table in TABLES for case in table.core)


APART = 0.1
"""Share by which budgets differ that are no longer the same: a share of plain's need is of another
need where cuDNN's kernels, which are timed anew in each process, take other workspaces."""


def pairs(rows: Mapping[Case, Record]) -> Iterator[tuple[str, Record, Record]]:
    """(what it is of, the row of `auto`, that of a system at the same budget), which fits."""
    for auto, systems in CORE.items():
        for system in systems:
            if auto in rows and system in rows and rows[system].outcome == "ok":
                mine, other = rows[auto].budget_nbytes, rows[system].budget_nbytes
                if mine is None or other is None or abs(mine - other) <= APART * other:
                    name = f"{auto.network} {auto.dtype} {auto.how} {system.variant}"
                    yield name, rows[auto], rows[system]


def measured() -> dict[Case, Record]:
    return papers.read_all(map(str, sorted(RESULTS.glob("papers_*_?.jsonl"))))


def test_auto_is_run_at_every_budget_of_a_system_in_the_core_tables():
    asked = {case for table in TABLES for case in table.cases}
    assert {auto for auto in CORE if auto not in asked} == set()


def seconds_of(row: Record) -> float:
    """Of plain's in the same process, where it ran; else predicted."""
    if row.step_seconds:
        return median(row.step_seconds) / row.plain_seconds
    return row.predicted_seconds


def worse(rows: Mapping[Case, Record], by: float) -> set[str]:
    """Where `auto` fails, or takes longer by more than this share."""
    return {
        name
        for name, auto, system in pairs(rows)
        if auto.outcome != "ok" or seconds_of(auto) > (1 + by) * seconds_of(system)
    }


def test_where_it_ran_auto_is_as_fast_as_the_five():
    assert worse(measured(), NOISE) == set()


def test_by_prediction_auto_is_as_fast_as_the_five():
    """Steps that are compiled for the card, without one; `auto` is planned within 1 % of its best."""
    assert worse(papers.read(COMPILED), NOISE) == set()


def test_every_budget_of_the_core_tables_has_a_row_of_auto():
    rows = {**papers.read(COMPILED), **measured()}
    fits = lambda case: case in rows and rows[case].outcome == "ok"
    missing = {
        auto for auto, systems in CORE.items() if any(map(fits, systems)) and auto not in rows
    }
    assert missing == set()
