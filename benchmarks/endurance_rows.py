"""The table of docs/rows/benchmarks.md from the rows of `endurance.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import records
from cells import grid

RESULTS = Path(__file__).parent / "results"

WATCHED = {
    "rss_nbytes": "RSS",
    "pinned_nbytes": "pinned",
    "device_nbytes": "device memory",
    "threads": "threads",
    "descriptors": "descriptors",
}
"""Quantities of a row, by their columns."""


def endurance() -> str:
    """The rows of every file, the last of each way: growth in percent, with the value at the end."""
    parts = []
    for path in sorted(RESULTS.glob("endurance_*.jsonl")):
        last = {row["way"]: row for row in records.lines(path)}
        header = ["way", "steps", "ms", *WATCHED.values(), "loss, of plain's", "commit"]
        parts.append(f"\n## {path.name}\n\n{TEXT}\n{grid(header, map(_line, last.values()))}")
    return "".join(parts)


TEXT = """Growth from the warm-up to the last step, and what there is then in MiB, of `python
benchmarks/endurance.py`; "dropped" makes that many steps and drops them.
"""


def _line(row: dict[str, Any]) -> list[str]:
    loss = row["loss"] / row["plain_loss"] if "loss" in row else None
    same = row.get("bits_of_plain", row["way"] == "plain")
    shown = "" if loss is None else "same bits" if same else f"{loss:.3f}"
    steps = f"{row.get('steps', row.get('made')):,}"
    ms = f"{1e3 * row['step_seconds']:.2f}" if "step_seconds" in row else ""
    return [f"`{row['way']}`", steps, ms, *(_grown(row, n) for n in WATCHED), shown, row["commit"]]


def _grown(row: dict[str, Any], name: str) -> str:
    found = row[name]
    last = f"{found['last'] / 2**20:.2f}" if name.endswith("nbytes") else str(found["last"])
    return f"{found['growth']:+.2f} % ({last})" if found["last"] else "0"
