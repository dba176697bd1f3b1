"""Makes the tables of docs/papers.md, docs/benchmarks.md and README.md, docs/rows/, and the figures.

    python benchmarks/pages.py

Everything comes from the rows in benchmarks/results/. The prose of docs/papers.md and
docs/benchmarks.md is written by hand; the tables stand between `<!-- rows: NAME -->` and
`<!-- end -->`. docs/rows/ has every row, beside the papers' own figures. A cell without a row is
empty.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import manifest
import measured
import plots
import records
from absl import app
from card_page import card_page, cards
from cells import TITLES, as_printed, cell, grid, value_of
from computed import Cell
from convergence_rows import convergence
from endurance_rows import endurance
from kernel_rows import (
    few_rows_tables,
    kernel_tables,
    masks_tables,
    pools_tables,
    softmaxes_tables,
    sums_tables,
)
from manifest import Case, Table, show_how
from papers import unneeded
from records import Record
from step_rows import step_tables
from summaries import summary

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- rows: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)

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
    return [Cell(**row) for row in records.lines(path)]


def kernels(folder: Path = RESULTS) -> list[dict]:
    """The rows of `convolutions.py`; the last of each kernel stands."""
    rows = records.lines(folder / "h200_convolution_layers.jsonl")
    last = {(r["layers"], r["kernel"], r["how"], r["limit"]): r for r in rows}
    return list(last.values())


# -- tables in Markdown


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
    header = [
        "division",
        "limit of each",
        "ms",
        "largest workspace, MiB",
        "workspaces together, MiB",
    ]
    text = f"\nOurs, measured, {machine}, strict float32, batch 256, kernels alone ({whole}):\n\n"
    return text + grid(header, lines)


def block(table: Table, rows: Rows) -> str:
    """All rows of `table`, beside the paper's figures: its section of docs/rows/papers.md."""
    parts = [published(table)]
    if table.computed:
        parts.append(of_cells(calculated(table)))
    if table.layers:
        parts.append(of_kernels(table.layers, kernels()))
    for dtype in dict.fromkeys(case.dtype for case in table.cases):
        quantities: Iterable[str] = (q for q in table.compares if q in TITLES)
        parts += [pivot(table, rows, dtype, quantity) for quantity in quantities]
    if table.plot and (FIGURES / f"{table.name}.svg").exists():
        parts.append(f"\n![{table.paper}, {table.item}](../figures/{table.name}.svg)\n")
    again = f"python benchmarks/papers.py --table={table.name} --out=rows.jsonl"
    title = f"\n## {table.paper}, {table.item}: {table.title} {{ #{table.name} }}\n"
    setup = f"\nThe paper: {table.setup}. {count(table, rows)}Run on a GPU: `{again}`\n"
    return title + setup + "".join(parts)


def short(table: Table, rows: Rows) -> str:
    """What stands in docs/papers.md: what is calculated if that is short, or the best rows and those
    that fail; and a link to all rows."""
    parts = []
    if table.computed and len(cells := calculated(table)) <= SHORT:
        parts.append(of_cells(cells))
    if table.layers and "kernels" in table.compares[-1]:
        parts.append(of_kernels(table.layers, kernels()))
    parts.append(summary(table, rows))
    return "".join(parts) + f"\n[All rows](rows/papers.md#{table.name})\n\n"


SHORT = 20
"""Calculated cells that docs/papers.md shows."""


def count(table: Table, rows: Rows) -> str:
    """How many of the rows are there, so that an empty cell is not taken for a zero."""
    if not (table.cases and table.runs):
        return ""
    own = [rows[case] for case in table.cases if case in rows]
    ran = sum(not row.device for row in own)
    idle = sum(case not in rows and bool(unneeded(table, case, rows)) for case in table.cases)
    text = f"{len(own)} of {len(table.cases) - idle} rows exist; {ran} ran on the card. "
    if idle:
        text += f"{idle} more are left out because plain `jax.jit` meets their budget. "
    return text


def filled(text: str, make: Callable[[str], str]) -> str:
    """`text` with what `make` gives for each name between its comments."""
    return BLOCK.sub(lambda match: f"{match[1]}{make(match[2])}{match[4]}", text)


def pages() -> dict[str, str]:
    """The pages below docs/ that hold tables, and their text."""
    rows, texts = all_rows(), {}
    tables = {name: manifest.load(name) for name in manifest.names()}
    prose = {name: (DOCS / name).read_text() for name in ("papers.md", "benchmarks.md", README)}
    texts["papers.md"] = filled(prose["papers.md"], lambda name: short(tables[name], rows))
    for name in ("benchmarks.md", README):
        texts[name] = filled(prose[name], measured.table)
    order = [match[1] for match in BLOCK.findall(prose["papers.md"])]
    texts["rows/papers.md"] = OF_PAPERS + "".join(block(tables[name], rows) for name in order)
    of_cards = "".join(map(card_page, cards()))
    of_kernels = kernel_tables() + sums_tables() + pools_tables() + softmaxes_tables()
    of_kernels += masks_tables() + few_rows_tables()
    of_kernels += step_tables()
    runs = endurance() + convergence()
    texts["rows/benchmarks.md"] = (
        OF_BENCHMARKS + of_cards + measured.every_row() + of_kernels + runs
    )
    return texts


README = "../README.md"

OF_PAPERS = """# Data: the papers' tables

All rows behind [the papers' tables](../papers.md), which says how to read them. This page is
generated by `python benchmarks/pages.py`.
"""
OF_BENCHMARKS = """# Data: benchmarks

All rows behind [the benchmarks](../benchmarks.md). This page is generated by `python
benchmarks/pages.py`.
"""


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    rows = all_rows()
    FIGURES.mkdir(exist_ok=True)
    for table in map(manifest.load, manifest.names()):
        if table.plot:
            plots.draw(table, rows, value_of, FIGURES / f"{table.name}.svg")
    for name, text in pages().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    app.run(main)
