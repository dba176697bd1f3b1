"""Fills docs/papers.md, and draws its figures, from the rows in benchmarks/results/.

    python benchmarks/pages.py

Prose is by hand. Between `<!-- rows: NAME -->` and `<!-- end -->` stands what the rows of that table
of benchmarks/tables/ say, beside the paper's own figures. A cell without a row is empty.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import manifest
import plots
import records
from absl import app
from computed import Cell
from manifest import Case, Table, show_how
from papers import unneeded
from records import Record

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/papers.md"
FIGURES = ROOT / "docs/figures"
RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- rows: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)

GIB = 2**30
Rows = Mapping[Case, Record]


def all_rows(folder: Path = RESULTS) -> dict[Case, Record]:
    """Every row of the papers' tables; one that ran stands for one that was only compiled."""
    found: dict[Case, Record] = {}
    for path in sorted(folder.glob("papers_*.jsonl")):
        for row in records.read(path):
            case = Case(row.model, row.batch, row.dtype, row.variant, row.asked)
            if case not in found or not row.device:
                found[case] = row
    return found


def calculated(table: Table, folder: Path = RESULTS) -> list[Cell]:
    """What `computed.py` gave for the table."""
    path = folder / f"{table.name}_computed.jsonl"
    return [Cell(**json.loads(line)) for line in path.read_text().splitlines()]


def kernels(folder: Path = RESULTS) -> list[dict]:
    """The rows of `convolutions.py`; the last of each kernel stands."""
    path = folder / "h200_convolution_layers.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    last = {(r["layers"], r["kernel"], r["how"], r["limit"]): r for r in rows}
    return list(last.values())


# -- cells


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


# -- tables in Markdown


def grid(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def pivot(table: Table, rows: Rows, dtype: str, quantity: str) -> str:
    """Ways by networks; what has no row is left out. "" where there is nothing to show."""
    cases = [case for case in table.cases if case.dtype == dtype]
    networks = [n for n in dict.fromkeys(c.network for c in cases)]
    plain = lambda n: Case(*_of(n), dtype, "plain")
    ways = dict.fromkeys(["plain", *(c.how for c in cases)])
    lines = []
    for how in ways:
        variant, _, asked = how.partition("@")
        asked_for = {n: Case(*_of(n), dtype, variant, asked) for n in networks}
        cells = [cell(rows.get(asked_for[n]), quantity) for n in networks]
        if any(cells):
            lines.append([show_how(how), *cells])
    measured = [n for n in networks if plain(n) in rows or any(c in rows for c in cases)]
    if not lines or not measured:
        return ""
    names = [n.replace(":", "(") + ")" for n in networks]
    return f"\n{dtype}: {TITLES[quantity]}\n\n" + grid([" ", *names], lines)


def _of(network: str) -> tuple[str, int]:
    model, batch = network.split(":")
    return model, int(batch)


def published(table: Table) -> str:
    """The paper's own figures: its tables as such, and single figures in one table together."""
    key = lambda figure: (figure.what, figure.unit, figure.at)
    single, found = [], []
    for (_, unit, at), group in itertools.groupby(table.published, key):
        figures = list(group)
        of, ways = (dict.fromkeys(getattr(f, name) for f in figures) for name in ("of", "how"))
        if len(figures) == 1 or min(len(of), len(ways)) == 1:
            single += figures
            continue
        values = {(f.of, f.how): as_printed(f.value) for f in figures}
        lines = [[o, *(values.get((o, how), "") for how in ways)] for o in of]
        found.append(f"\nThe paper's ({at}{unit and ', ' + unit}):\n\n" + grid([" ", *ways], lines))
    if single:
        lines = [
            [
                ", ".join(filter(None, [WHAT.get(f.what, f.what), f.of, show_how(f.how)])),
                " ".join(filter(None, [as_printed(f.value), f.unit, f.note and f"({f.note})"])),
                f.at,
            ]
            for f in single
        ]
        found.insert(0, "\n" + grid(["The paper's", "figure", "where"], lines))
    return "".join(found)


WHAT = {
    "need": "peak",
    "average_nbytes": "average memory",
    "moved_nbytes": "moved",
    "pinned_nbytes": "pinned",
    "seconds": "time",
}
"""What quantities are called among the paper's figures."""


def of_cells(cells: Sequence[Cell]) -> str:
    """What was calculated: what is said of it by what it is of and how."""
    whats = list(dict.fromkeys(c.what for c in cells))
    unit = {c.what: c.unit for c in cells}
    exact = lambda value: as_printed(round(value, 3))
    values = {(c.of, c.how, c.what): exact(c.value) for c in cells}
    lines = [
        [of, show_how(how), *(values.get((of, how, what), "") for what in whats)]
        for of, how in dict.fromkeys((c.of, c.how) for c in cells)
    ]
    header = [" ", " ", *(f"{what}, {unit[what]}" for what in whats)]
    return "\nOurs, calculated:\n\n" + grid(header, lines)


def of_kernels(prefix: str, rows: Sequence[dict]) -> str:
    """Sums over the kernels whose names begin so: milliseconds and the largest workspace by limit."""
    layers, _, name = prefix.partition(" ")
    own = [r for r in rows if r["layers"] == layers and r["kernel"].startswith(name)]
    own = [r for r in own if not r.get("relu") and "bias" not in r["kernel"]]
    lines = []
    limits = sorted({r["limit"] for r in own if r["limit"] is not None})
    whole = len({r["kernel"] for r in own})
    for how, limit in [
        ("xla", None),
        *itertools.product(("undivided", "divided"), [*limits, None]),
    ]:
        some = [r for r in own if (r["how"], r["limit"]) == (how, limit)]
        if len(some) == whole:
            workspaces = [r.get("workspace", 0) for r in some]
            lines.append(
                [
                    how,
                    "none" if limit is None else f"{limit // 2**20} MiB",
                    f"{1e3 * sum(r['seconds'] for r in some):.2f}",
                    "" if how == "xla" else f"{max(workspaces) / 2**20:.1f}",
                    "" if how == "xla" else f"{sum(workspaces) / 2**20:.1f}",
                ]
            )
    machine = own[0]["machine"].partition(" (")[0]
    header = ["way", "limit of each", "ms", "largest workspace, MiB", "workspaces together, MiB"]
    text = f"\nOurs, measured, {machine}, strict float32, batch 256, kernels alone ({whole}):\n\n"
    return text + grid(header, lines)


def block(table: Table, rows: Rows) -> str:
    """What stands on the page for `table`."""
    parts = [published(table)]
    if table.computed:
        parts.append(of_cells(calculated(table)))
    if table.layers:
        parts.append(of_kernels(table.layers, kernels()))
    for dtype in dict.fromkeys(case.dtype for case in table.cases):
        quantities: Iterable[str] = (q for q in table.compares if q in TITLES)
        parts += [pivot(table, rows, dtype, quantity) for quantity in quantities]
    if table.plot and (FIGURES / f"{table.name}.svg").exists():
        parts.append(f"\n![{table.paper}, {table.item}](figures/{table.name}.svg)\n")
    again = f"python benchmarks/papers.py --table={table.name} --out=rows.jsonl"
    parts.append(f"\n{count(table, rows)}`{again}`\n\n")
    return "".join(parts)


def count(table: Table, rows: Rows) -> str:
    """How many of the rows are there, so that an empty cell is not taken for a zero."""
    if not (table.cases and table.runs):
        return "Again: "
    own = [rows[case] for case in table.cases if case in rows]
    ran = sum(not row.device for row in own)
    idle = sum(case not in rows and bool(unneeded(table, case, rows)) for case in table.cases)
    text = (
        f"{len(own)} of {len(table.cases) - idle} rows are there, {ran} of them ran on the card. "
    )
    if idle:
        text += f"{idle} more would say nothing, since plain `jax.jit` meets their budget. "
    return text + "All of them, on a GPU: "


def filled(text: str, make: Callable[[str], str]) -> str:
    """`text` with what `make` gives for each name between its comments."""
    return BLOCK.sub(lambda match: f"{match[1]}{make(match[2])}{match[4]}", text)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    rows = all_rows()
    FIGURES.mkdir(exist_ok=True)
    for table in map(manifest.load, manifest.names()):
        if table.plot:
            plots.draw(table, rows, value_of, FIGURES / f"{table.name}.svg")
    PAGE.write_text(filled(PAGE.read_text(), lambda name: block(manifest.load(name), rows)))


if __name__ == "__main__":
    app.run(main)
