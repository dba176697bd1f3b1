"""The tables of docs/rows/benchmarks.md from the rows of `convergence.py`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import records
from cells import grid

RESULTS = Path(__file__).parent / "results"


def convergence() -> str:
    """A table for each run, which ends with the row of its comparison."""
    parts = []
    for path in sorted(RESULTS.glob("convergence_*.jsonl")):
        runs: list[list[dict[str, Any]]] = [[]]
        for row in records.lines(path):
            runs[-1].append(row)
            if row["way"] == "comparison":
                runs.append([])
        tables = [_table(run) for run in runs if run]
        parts.append(f"\n## {path.name}\n\n{TEXT}\n" + "\n".join(tables))
    return "".join(parts)


TEXT = """Mean losses of the last steps and accuracy on test images, over seeds, of `python
benchmarks/convergence.py`; how far a way's mean curve is from plain's at the most, beside how far
one of plain's own is from their mean.
"""


def _table(run: list[dict[str, Any]]) -> str:
    *rows, comparison = run
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        last = [row["losses"][-1] for row in own]
        apart = f"{comparison[way]:.4f}" if way in comparison else f"({comparison['spread']:.4f})"
        accuracy = statistics.mean(row["accuracy"] for row in own)
        step = f"{own[0]['model']} {own[0]['dtype']}, {own[0]['steps']} steps"
        figures = [f"{min(last):.4f} to {max(last):.4f}", f"{accuracy:.1%}", apart]
        lines.append([step, f"`{way}`", str(len(own)), *figures, own[0]["commit"]])
    header = ["step", "way", "seeds", "last loss", "accuracy", "from plain's curve", "commit"]
    return grid(header, lines)
