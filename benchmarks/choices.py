"""Whether `auto` chose the fastest way that a sweep by hand finds in the same memory.

    python benchmarks/choices.py --described=rows.jsonl --model=gpt          what to describe next
    python benchmarks/choices.py --described=rows.jsonl --model=gpt --time   what to time

Prints ways for `training_steps.py --ways`; `choices.sh` does it all. By hand a step has exact
residuals or is recomputed within the budget, whole or in 2, 4 or 8 sub-batches. A way that keeps
exact residuals and fits has nothing to recompute, so that recomputation is described where it does
not fit. Of the ways by hand that fit a budget the fastest by prediction is timed, and all that are
within `NEAR` of `auto`'s: the worst error of predictions is less. Of ways with one plan the first is
timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import records
from absl import app, flags
from cells import grid

FLAGS = flags.FLAGS

BUDGETS = ("1.0", "0.5", "0.33", "0.25", "0.2")
PARTS = (1, 2, 4, 8)
NEAR = 1.2
"""How many times as long as `auto` a way that is timed is predicted to take: the worst error that
predictions without a profile are to have."""

Row = dict[str, Any]


def to_describe(rows: Iterable[Row]) -> list[str]:
    """The ways of a step to describe next; none once all are."""
    found = {row["way"]: row for row in rows}
    first = ["plain", *BUDGETS, *(_way("exact", "", parts) for parts in PARTS)]
    if missing := [way for way in first if way not in found]:
        return missing
    return [
        way
        for budget in BUDGETS
        for parts in PARTS
        if (way := _way("recompute", budget, parts)) not in found
        and _is_possible(exact := found[_way("exact", "", parts)])
        and not _fits(exact, budget, found["plain"])
    ]


def to_time(rows: Iterable[Row]) -> list[str]:
    """The ways of a described step to time, plain first."""
    found = {row["way"]: row for row in rows}
    chosen = ["plain"]
    for budget in BUDGETS:
        auto = found[budget]
        if not _is_possible(auto):
            continue
        fitting = {way: found[way]["predicted_ms"] for way in _fitting(found, budget)}
        most = max(NEAR * auto["predicted_ms"], min(fitting.values(), default=0.0))
        chosen += [budget, *(way for way, ms in fitting.items() if ms <= most)]
    first: dict[Any, str] = {}
    for way in chosen:
        first.setdefault(_plan(found[way]), way)
    return [*first.values()]


def choices(described: Iterable[Row], timed: Iterable[Row]) -> list[Row]:
    """For each budget that `auto` met: what it and the best by hand take of plain's time, and how
    many ways by hand were timed. Of ways with one plan, by `described`, one stands for all.

    Each plain row of `timed` begins those of another process. Only ways of one process are compared:
    of the one that timed most ways by hand for the budget.
    """
    described_of = {row["way"]: row for row in described}
    runs: list[list[Row]] = []
    for row in timed:
        if row["way"] == "plain":
            runs.append([])
        runs[-1].append(row)
    found = (_choice(described_of, run, budget) for budget in BUDGETS for run in runs)
    made = [line for line in found if line]
    each = lambda budget: [line for line in made if line["budget"] == budget]
    return [max(each(b), key=lambda line: line["count"]) for b in BUDGETS if each(b)]


def _choice(described: Mapping[str, Row], run: list[Row], budget: str) -> Row | None:
    """What `run` says of `budget`; None where `auto` was not timed in it."""
    by_plan = {_plan(described[row["way"]]): row for row in run if "ms" in row}
    plain, auto = by_plan.get(_plan(described["plain"])), by_plan.get(_plan(described[budget]))
    if plain is None or auto is None:
        return None
    measured = {way: by_plan.get(_plan(described[way])) for way in _fitting(described, budget)}
    rest = {way: row["ms"] for way, row in measured.items() if row}
    best = min(rest, key=lambda way: rest[way], default="")
    return {
        "budget": budget,
        "of_plain": auto["ms"] / plain["ms"],
        "best": best,
        "best_of_plain": rest[best] / plain["ms"] if best else None,
        "of_best": auto["ms"] / rest[best] if best else None,
        "count": len(rest),
    }


CHOICES = """What `auto` takes of plain's time, and the fastest of the ways by hand that fit and were
timed: exact residuals, or recomputation within the budget, whole or in 2, 4 or 8 sub-batches. By `sh
benchmarks/choices.sh`; all ways that were described are in the file beside it.
"""


def choices_tables(folder: Path) -> str:
    """The rows of every file, and of what was described of the same steps."""
    parts = []
    for path in sorted(folder.glob("choices_*.jsonl")):
        if path.stem.endswith("_compiled"):
            continue
        described = records.lines(path.with_name(f"{path.stem}_compiled.jsonl"))
        lines = []
        for model, rows in itertools.groupby(records.lines(path), lambda row: row["model"]):
            timed = [*rows]
            step = f"{model}({timed[0]['batch']})" + (", scanned" if timed[0]["scanned"] else "")
            for found in choices((row for row in described if row["model"] == model), timed):
                way = f"`{found['best']}`" if found["count"] else "none fits"
                figures = (found[name] for name in ("best_of_plain", "of_best"))
                by_hand = [way, *("" if x is None else f"{x:.3f}" for x in figures)]
                lines.append([step, found["budget"], f"{found['of_plain']:.3f}", *by_hand])
        header = ["step", "budget", "`auto`", "best by hand", "of plain", "`auto` of it"]
        notes = dict.fromkeys(row["note"] for row in records.lines(path) if "note" in row)
        table = grid(header, lines) + "".join(f"\n{note}\n" for note in notes)
        parts.append(f"\n## {path.name}\n\n{CHOICES}\n" + table)
    return "".join(parts)


def _way(policy: str, budget: str, parts: int) -> str:
    """As `training_steps.py --ways` has it."""
    return policy + (f"@{budget}" if budget else "") + (f"*{parts}" if parts > 1 else "")


def _by_hand(way: str, budget: str) -> bool:
    """Whether a way is one by hand for `budget`."""
    policy, _, rest = way.partition("*")[0].partition("@")
    return policy == "exact" or (policy == "recompute" and rest == budget)


def _fitting(described: Mapping[str, Row], budget: str) -> list[str]:
    """The ways by hand that fit."""
    plain = described["plain"]
    return [w for w, row in described.items() if _by_hand(w, budget) and _fits(row, budget, plain)]


def _is_possible(row: Row) -> bool:
    return "gib" in row and "error" not in row


def _fits(row: Row, budget: str, plain: Row) -> bool:
    return _is_possible(row) and row["gib"] <= float(budget) * plain["gib"]


def _plan(row: Row) -> tuple[Any, ...]:
    """What two ways with one plan have in common: the bytes that it compiles to and what is
    predicted of it."""
    if "predicted_ms" not in row:
        return (row["way"],)
    return row["gib"], row["predicted_gib"], row["predicted_ms"]


def main(_: Any) -> None:
    path = Path(FLAGS.described)
    every = records.lines(path) if path.exists() else []
    rows = [row for row in every if row["model"] == FLAGS.model]
    print(",".join(to_time(rows) if FLAGS.time else to_describe(rows)))


if __name__ == "__main__":
    flags.DEFINE_string("described", "described.jsonl", "rows of ways that were compiled only")
    flags.DEFINE_string("model", "gpt", "the network")
    flags.DEFINE_bool("time", False, "print what to time")
    app.run(main)
