"""Cells and grids of the pages' tables, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from records import Record

GIB = 2**30


def value_of(row: Record, quantity: str) -> float | None:
    """A quantity of a row in the unit of its table: GiB, ms, or a count; None where it has none.

    The least of a policy is what it compiled to, also where no plan was found for just that.
    """
    if row.outcome != "ok":
        least = row.asked == "least" and row.lowest_compiled and quantity in ("need", "batch")
        return row.lowest / GIB if least and row.lowest else None
    if quantity == "seconds":
        return 1e3 * statistics.median(row.step_seconds) if row.step_seconds else None
    if quantity == "predicted_seconds":
        return None if row.predicted_seconds is None else 1e3 * row.predicted_seconds
    value = getattr(row, "need" if quantity == "batch" else quantity)
    if value is None:
        return None
    return value / GIB if quantity in ("need", "batch") or quantity.endswith("nbytes") else value


def cell(row: Record | None, quantity: str) -> str:
    """A quantity for people: what was predicted in italics, failures in words; behind a measured time
    its ratio to plain jit's of the same process."""
    if row is None:
        return ""
    value = value_of(row, quantity)
    if value is None and row.outcome != "ok":
        return failure(row)
    if value is None and quantity == "seconds":
        predicted = value_of(row, "predicted_seconds")
        return "" if predicted is None else f"*{number(predicted)}*"
    if value is None:
        return ""
    if quantity == "seconds" and row.plain_seconds:
        return f"{number(value)} ({value / 1e3 / row.plain_seconds:.3f})"
    return f"*{number(value)}*" if quantity == "average_nbytes" else number(value)


def failure(row: Record) -> str:
    if row.lowest is not None:
        how = "" if row.lowest_compiled else ", predicted"
        return f"fails ({number(row.lowest / GIB)} GiB{how})"
    if row.outcome.startswith("time limit"):
        return "fails (time)"
    if "RESOURCE_EXHAUSTED" in row.outcome:
        return "fails (memory)"
    return f"fails ({row.outcome.partition(':')[0]})"


def number(value: float) -> str:
    """Two decimals, more below 1, none from 100 on."""
    if isinstance(value, int) or value == 0:
        return f"{int(value):,}"
    return f"{value:,.{0 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3}f}"


def as_printed(value: float | str) -> str:
    """Every digit that there is."""
    return value if isinstance(value, str) else f"{value:,}"


TITLES = {
    "need": "compiled peak, GiB",
    "batch": "compiled peak, GiB",
    "average_nbytes": "average memory, GiB, predicted",
    "moved_nbytes": "moved each way, GiB",
    "pinned_nbytes": "pinned host memory, GiB",
    "seconds": "time of a step, ms, measured (of plain's in the same process); *predicted*",
    "divided": "convolutions in micro-batches",
}
"""What a quantity of a Record is called over its table."""


def grid(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    row = lambda line: f"| {' | '.join(line)} |\n"
    return row(header) + f"|---|{'---:|' * (len(header) - 1)}\n" + "".join(map(row, lines))
