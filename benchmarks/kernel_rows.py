"""The tables of docs/rows/benchmarks.md of `kernel_table.py` and of kernels of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import records
from cells import grid
from kernel_table import ORDER

RESULTS = Path(__file__).parent / "results"

TEXT = """Milliseconds of a traced step by class of kernel, and the rate at which it reads and writes
as a share of the memory's, by `python benchmarks/kernel_table.py`. The cache lets some go over it.
"""


def kernel_tables(folder: Path = RESULTS) -> str:
    """The rows of every file: classes by steps, one table for the steps of each network."""
    parts = []
    for path in sorted(folder.glob("kernels_*.jsonl")):
        rows = records.lines(path)
        networks = dict.fromkeys(_network(row) for row in rows)
        tables = (
            _table(network, [r for r in rows if _network(r) == network]) for network in networks
        )
        parts.append(f"\n## {path.name}\n\n{TEXT}" + "".join(tables))
    return "".join(parts)


SUMS = """Microseconds of the sums of a batch norm's backward pass behind a ReLU by XLA's passes and
by one kernel, alone and with the gradient behind them, by `python benchmarks/sums.py`. join: the
masked gradient is written; own: it is not.
"""


def sums_tables(folder: Path = RESULTS) -> str:
    """The rows of every file, without other tilings."""
    parts = []
    for path in sorted(folder.glob("sums_*.jsonl")):
        lines = [
            [
                "{images}×{side}×{side}×{channels}, {kind}".format(**row),
                *(f"{row[name]:.0f}" for name in ("xla_us", "us")),
                *(f"{row[name]:.0f}" for name in ("xla_with_gradient_us", "with_gradient_us")),
                f"{row['nbytes'] / row['us'] / 1e6:.2f}",
            ]
            for row in records.lines(path)
        ]
        header = ["sums", "XLA", "one kernel", "XLA, gradient", "one kernel, gradient", "TB/s"]
        parts.append(f"\n## {path.name}\n\n{SUMS}\n" + grid(header, lines))
    return "".join(parts)


POOLS = """Microseconds of a max-pool of 3 × 3 windows behind a batch norm and a ReLU, with its index,
and of its gradient, by XLA's passes and by one kernel, by `python benchmarks/pools.py`.
"""


def pools_tables(folder: Path = RESULTS) -> str:
    """The rows of every file that have the usual tiling."""
    parts = []
    for path in sorted(folder.glob("pools_*.jsonl")):
        lines = [
            [
                "{batch} of {layer}, {dtype}, {half}".format(**row),
                *(f"{row[name]:.0f}" for name in ("xla_us", "us")),
                f"{row['nbytes'] / row['us'] / 1e6:.2f}",
                "yes" if row["same"] else "no",
            ]
            for row in records.lines(path)
            if row["usual"]
        ]
        header = ["images", "XLA", "one kernel", "TB/s", "the same values"]
        parts.append(f"\n## {path.name}\n\n{POOLS}\n" + grid(header, lines))
    return "".join(parts)


SOFTMAXES = """Microseconds of a softmax with dropout in bits, and of the gradient to its scores, by
what XLA makes of it alone and by one kernel, by `python benchmarks/softmaxes.py`: one of six in a
program, with a sixth of what its start takes, some 55 µs.
"""


def softmaxes_tables(folder: Path = RESULTS) -> str:
    """The rows of every file, without other tilings."""
    parts = []
    for path in sorted(folder.glob("softmaxes_*.jsonl")):
        lines = [
            [
                "×".join(map(str, row["scores"])) + f", {row['kind']}",
                *(f"{row[name]:.0f}" for name in ("xla_us", "us")),
                f"{row['difference']:.4f}",
            ]
            for row in records.lines(path)
        ]
        header = ["samples×heads×tokens", "XLA", "one kernel", "largest difference"]
        parts.append(f"\n## {path.name}\n\n{SOFTMAXES}\n" + grid(header, lines))
    return "".join(parts)


MASKS = """Microseconds of a dropout mask in bits by what XLA makes of it and by one kernel, by
`python benchmarks/masks.py`: one of twenty in a program.
"""


def masks_tables(folder: Path = RESULTS) -> str:
    """The rows of every file."""
    parts = []
    for path in sorted(folder.glob("masks_*.jsonl")):
        lines = [
            [
                row["mask"],
                f"{row['words'] / 1e6:.1f}",
                *(f"{row[name]:.0f}" for name in ("xla_us", "us")),
                f"{1e6 * row['us'] / row['words']:.2f}",
                "yes" if row["same"] else "no",
            ]
            for row in records.lines(path)
        ]
        header = ["mask", "words, millions", "XLA", "one kernel", "ps a word", "the same bits"]
        parts.append(f"\n## {path.name}\n\n{MASKS}\n" + grid(header, lines))
    return "".join(parts)


FEW_ROWS = """Microseconds of gradients to tables of few rows, and of sums over few samples, as JAX
has them and as plans do, by `python benchmarks/few_rows.py`: one of eight in a program. Errors are
shares of the largest element.
"""


def few_rows_tables(folder: Path = RESULTS) -> str:
    """The rows of every file."""
    parts = []
    for path in sorted(folder.glob("few_rows_*.jsonl")):
        lines = [
            [
                _of_few_rows(row),
                *(f"{row[name]:,.0f}" for name in ("plain_us", "ours_us")),
                *(f"{row[name]:.1g}" for name in ("plain_error", "ours_error")),
            ]
            for row in records.lines(path)
        ]
        header = ["what", "JAX", "plans", "error of JAX's", "of plans'"]
        parts.append(f"\n## {path.name}\n\n{FEW_ROWS}\n" + grid(header, lines))
    return "".join(parts)


def _of_few_rows(row: dict[str, Any]) -> str:
    if row["kind"] == "sum":
        return f"sum over {row['samples']} samples"
    places = "×".join(f"{n:,}" for n in row["places"])
    kind = "positions" if row["indices"] == "positions" else "indices"
    return f"{row['rows']} rows of {row['columns']}, {places} {kind}, {row['dtype']}"


def _network(row: dict[str, Any]) -> str:
    return row["step"].rpartition("_")[0]


def _table(network: str, rows: list[dict[str, Any]]) -> str:
    cells = {(row["class"], row["step"]): row for row in rows}
    steps = list(dict.fromkeys(row["step"] for row in rows))
    names = [name for name in ORDER if any((name, step) in cells for step in steps)]
    lines = [[name, *(_cell(cells.get((name, step))) for step in steps)] for name in names]
    total = {step: sum(row["ms"] for row in rows if row["step"] == step) for step in steps}
    lines.append(["the step", *(f"{ms:.2f}" for ms in total.values())])
    about = rows[-1]
    title = f"\n{network}, {about['card']}, JAX {about['jax']}, commit {about['commit'][:7]}\n\n"
    return title + grid(["class", *(step.rpartition("_")[2] for step in steps)], lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['ms']:.2f}" + (f" ({row['share']:.0%})" if row["share"] else "")
