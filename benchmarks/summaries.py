"""The short form of a paper's table: for each network plain jit, the best rows, and those that fail.

A table with few variants is short as it is. `pages.py` puts all rows on a page of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cells import cell, grid, number, value_of
from manifest import Case, Table
from records import Record

FEW = 6
"""Variants that a table may have and still be shown as it is."""

SYSTEM_OF = {
    "vDNN": "vdnn",
    "vDNN++": "vdnnpp",
    "moDNN": "modnn",
    "SuperNeurons": "superneurons",
    "µ-cuDNN": "ucudnn",
}
"""The policy that is the system of a paper."""

NAMES = {
    "need": "Compiled peak, GiB",
    "batch": "Compiled peak, GiB",
    "pinned_nbytes": "Pinned host memory, GiB",
    "moved_nbytes": "Moved in each direction, GiB",
    "seconds": "Measured time of a step: plain's in ms, others as multiples of it",
}
"""What stands over a table of a quantity."""

Rows = Mapping[Case, Record]


def summary(table: Table, rows: Rows) -> str:
    """Markdown for docs/papers.md: the table's first quantity, times if it has any; "" for a table
    without rows of steps. Peaks and bytes are shown for the table's first dtype."""
    if not (table.cases and table.runs):
        return ""
    dtypes = dict.fromkeys(case.dtype for case in table.cases)
    quantity = "seconds" if "seconds" in table.compares else table.compares[0]
    found = [text for dtype in dtypes if (text := _of_dtype(table, rows, dtype, quantity))]
    return "".join(found if quantity == "seconds" else found[:1])


def _of_dtype(table: Table, rows: Rows, dtype: str, quantity: str) -> str:
    if quantity not in NAMES:
        return ""
    cases = [c for c in _with_plain(table) if c.dtype == dtype and c in rows]
    if quantity == "seconds":  # what was only compiled took no time
        timed = {c.network for c in cases if rows[c].step_seconds and c.variant != "plain"}
        some = lambda c: rows[c].step_seconds or rows[c].outcome != "ok"
        cases = [c for c in cases if c.network in timed and some(c)]
    of = {n: [c for c in cases if c.network == n] for n in dict.fromkeys(c.network for c in cases)}
    of = {n: own for n, own in of.items() if any(c.variant != "plain" for c in own)}
    if not of:
        return ""
    variants = dict.fromkeys(c.how for own in of.values() for c in own)
    if len(variants) <= FEW:
        header = [dtype, *map(_shown, of)]
        by = {(c.network, c.how): _value(rows[c], quantity) for c in cases}
        lines = [[f"`{how}`", *(by.get((n, how), "") for n in of)] for how in variants]
        lines = [line for line in lines if any(line[1:])]
    else:
        system = SYSTEM_OF[table.paper]
        header = [dtype, "plain", f"`{system}`", "`auto`", "fails"]
        lines = [[_shown(n), *_best(own, rows, quantity, system)] for n, own in of.items()]
    return f"\n{NAMES[quantity]}:\n\n" + grid(header, lines)


def _with_plain(table: Table) -> list[Case]:
    plain = [Case(c.model, c.batch, c.dtype, "plain") for c in table.cases]
    return list(dict.fromkeys([*plain, *table.cases]))


def _shown(network: str) -> str:
    return network.replace(":", "(") + ")"


def _value(row: Record, quantity: str) -> str:
    """As on the page of all rows; of times the ratio to plain jit's where that is known."""
    if quantity == "seconds" and row.step_seconds and row.plain_seconds and row.variant != "plain":
        return _ratio(row, quantity)
    return cell(row, quantity).partition(" (1.000)")[0]


def _ratio(row: Record, quantity: str) -> str:
    value = value_of(row, quantity)
    assert value is not None, "asked only of rows that have it"
    if quantity == "seconds" and row.plain_seconds:
        return f"{value / 1e3 / row.plain_seconds:.2f}"
    return number(value)


def _best(cases: Sequence[Case], rows: Rows, quantity: str, system: str) -> list[str]:
    """Plain jit; the best of `system` and of `auto`, of times the worst as well; what fails."""

    def ends(policy: str) -> str:
        own = [c for c in cases if c.variant.partition("?")[0] == policy]
        values = {c: v for c in own if (v := value_of(rows[c], quantity)) is not None}
        some = sorted(values, key=lambda c: values[c])
        some = [some[0], some[-1]] if quantity == "seconds" and len(some) > 1 else some[:1]
        return " to ".join(f"{_ratio(rows[c], quantity)} `{c.how}`" for c in some)

    plain = [_value(rows[c], quantity) for c in cases if c.variant == "plain"]
    failed = [c.how for c in cases if rows[c].outcome != "ok" and c.asked != "least"]
    return ["".join(plain), ends(system), ends("auto"), ", ".join(f"`{how}`" for how in failed)]
