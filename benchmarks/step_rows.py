"""The tables of docs/rows/benchmarks.md of graphs, slices, tuning, gradients and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import records
from cells import grid
from choices import choices_tables

RESULTS = Path(__file__).parent / "results"

GRAPHS = """Milliseconds a step with convolutions in CUDA graphs and launched one by one, and the
losses of both after as many steps, by `python benchmarks/graphs.py`. From the cache: the executables
were taken from JAX's compilation cache. In some rows the first call records graphs, too.
"""


def step_tables(folder: Path = RESULTS) -> str:
    """What graphs gain, what slices take, what tuning keeps, how far gradients are from float32's,
    what `auto` chose, and how far predictions are from what was measured."""
    found = graphs_tables(folder) + slices_tables(folder)
    found += tuned_tables(folder) + gradients_tables(folder)
    found += choices_tables(folder)
    return found + errors_table(folder / "prediction_errors.jsonl")


def graphs_tables(folder: Path = RESULTS) -> str:
    """The rows of every file; what failed with its error."""
    parts = []
    for path in sorted(folder.glob("graphs_*.jsonl")):
        lines = [
            [
                "{model}({batch}) {dtype}, {way}".format(**row),
                "cache" if row["cached"] else "",
                "records" if row["first_records"] else "launches",
                *(_number(row, name, 2) for name in ("ms_graphs", "ms_launches")),
                *(_number(row, name, 6) for name in ("loss_graphs", "loss_launches")),
                " ".join(row.get("error", "").split())[:80].replace("|", " "),
            ]
            for row in records.lines(path)
        ]
        header = ["step", "from the", "first call", "graphs", "launches"]
        header += ["loss with graphs", "with launches", "error"]
        parts.append(f"\n## {path.name}\n\n{GRAPHS}\n" + grid(header, lines))
    return "".join(parts)


SLICES = """Microseconds an iteration of a loop of small layers and of its backward loop, where stacks
stay on the device and where slices of them leave it and return, by `python benchmarks/slices.py`.
"""


def slices_tables(folder: Path = RESULTS) -> str:
    """The rows of every file."""
    parts = []
    for path in sorted(folder.glob("slices_*.jsonl")):
        lines = [
            [
                f"{row['slice_nbytes'] / 1024:.0f} KiB",
                str(row["stacks"]),
                *(f"{500 * row[name] / row['iterations']:.1f}" for name in ("exact_ms", "ms")),
            ]
            for row in records.lines(path)
        ]
        header = ["a slice", "stacks", "they stay", "they move"]
        parts.append(f"\n## {path.name}\n\n{SLICES}\n" + grid(header, lines))
    return "".join(parts)


TUNED = """Milliseconds a step of the plans that `tune=True` times, and predicted, by `python
benchmarks/tuned.py`.
"""


def tuned_tables(folder: Path = RESULTS) -> str:
    """The rows of every file, a line for each plan."""
    parts = []
    for path in sorted(folder.glob("tuned_*.jsonl")):
        lines = [
            [
                "{model}({batch}), {budget}".format(**row),
                plan["what"],
                f"{plan['ms']:.1f}" if plan["ms"] else plan["note"],
                f"{plan['predicted_ms']:.1f}",
                "kept" if plan["what"] == row["kept"] else "",
            ]
            for row in records.lines(path)
            for plan in row["plans"]
        ]
        header = ["step", "plan", "ms", "predicted", ""]
        parts.append(f"\n## {path.name}\n\n{TUNED}\n" + grid(header, lines))
    return "".join(parts)


GRADIENTS = """The relative distance of a first step's gradients from those in float32, and the cosine
of the angle between both: the median and the worst parameter's. By `python benchmarks/gradients.py`.
"""


def gradients_tables(folder: Path = RESULTS) -> str:
    """The rows of every file."""
    parts = []
    for path in sorted(folder.glob("gradients_*.jsonl")):
        names = ("median", "most", "cosine", "least_cosine", "statistics_most")
        lines = [
            ["{model}({batch}) {dtype}".format(**row), f"`{row['way']}`"]
            + [_number(row, name, 4) for name in names]
            for row in records.lines(path)
        ]
        header = ["step", "way", "distance", "worst", "cosine", "least", "worst running statistic"]
        parts.append(f"\n## {path.name}\n\n{GRADIENTS}\n" + grid(header, lines))
    return "".join(parts)


ERRORS = """Milliseconds of a step by plain `jax.jit`, measured, and predicted without a profile by
the code at the commit behind them, by `python benchmarks/prediction_errors.py`.
"""


def errors_table(path: Path) -> str:
    rows = records.lines(path)
    lines = []
    for row in rows:
        shape = [f"{row[name]} {name}" for name in ("layers", "tokens", "attention") if name in row]
        kind = "scanned" if row["scanned"] else "unrolled"
        step = ", ".join(["{model}({batch})".format(**row), kind, *shape])
        figures = [_number(row, "ms", 1), _number(row, "predicted_ms", 1), _number(row, "ratio", 3)]
        lines.append([step, row["device"], *figures, row["measured_at"][:7], row["commit"][:7]])
    header = ["step", "card", "ms", "predicted", "ratio", "measured at", "predicted at"]
    return f"\n## {path.name}\n\n{ERRORS}\n" + grid(header, lines)


def _number(row: dict[str, Any], name: str, digits: int) -> str:
    return f"{row[name]:.{digits}f}" if name in row else ""
