"""The ledger: one row for each run of many programs, and their totals.

Rows stand in benchmarks/results/fuzz.jsonl. A program of their counts is one step with one set of
options.
`python -m tests.fuzz --ledger=PATH` appends a row, and
`python -m tests.fuzz --totals=PATH` prints a table.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .check import BUDGET, CRASHED, ENDED, FIT, HUNG, OVER, REFUSED, UNTRUE
from .driver import Counts, Settings
from .results import WRONG

COUNTED = (FIT, REFUSED, OVER, WRONG, CRASHED, ENDED, HUNG, UNTRUE)


def row_of(counts: Counts, settings: Settings, seconds: float, commit: str = "") -> dict:
    """One row of the ledger.

    Args:
      seconds: on the clock.
      commit: that was run; by default the one that is checked out.
    """
    summary = counts.summary()
    return {
        "commit": commit or checked_out(),
        "jax": importlib.metadata.version("jax"),
        "platform": settings.platform,
        "transport": settings.transport,
        "seconds": round(seconds),
        "processes": settings.processes,
        "programs": summary["programs"],
        "possible": counts.possible,
        "possible_fit": counts.possible_fit,
        "budget_errors": counts.outcomes[BUDGET] + counts.outcomes[UNTRUE],
        "lowest_met": counts.true,
        "lowest_asked": counts.asked,
        **{name: counts.outcomes[name] for name in COUNTED},
        "slow": counts.slow,
        "findings": dict(counts.signatures),
    }


def checked_out() -> str:
    """The commit of this checkout; "" without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    try:
        found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


class Ledger:
    """The row of one run in the file at `path`, written anew as the run goes on.

    Whatever ends the run, its row holds all that was counted before.
    """

    def __init__(self, path: str) -> None:
        self._path, self._written = Path(path), ""

    def write(self, row: dict) -> None:
        """Puts `row` in the place of this run's row before, or at the end."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        lines = [line for line in lines if line != self._written]
        self._written = json.dumps(row)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        new.write_text("".join(f"{line}\n" for line in [*lines, self._written]))
        new.replace(self._path)


def totals(rows: Iterable[dict]) -> str:
    """A table of all rows by version of JAX and platform.

    Older rows do not tell which budgets were possible, so they count for the other columns only.
    """
    sums: dict[tuple[str, str], collections.Counter[str]] = {}
    for row in rows:
        key = row["jax"], row["platform"]
        numbers = {n: value for n, value in row.items() if isinstance(value, int)}
        sums.setdefault(key, collections.Counter()).update(numbers)
    lines = [
        "| JAX | platform | programs | fit | BudgetErrors | lowest peaks met | over | wrong "
        "| crashed | ended | hung | possible that fit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (version, platform), n in sorted(sums.items()):
        met = f"{n['lowest_met']} of {n['lowest_asked']}"
        possible = f"{n['possible_fit']} of {n['possible']}" if n["possible"] else "–"
        found = " | ".join(str(n[name]) for name in (OVER, WRONG, CRASHED, ENDED, HUNG))
        lines.append(
            f"| {version} | {platform} | {n['programs']} | {n[FIT]} | {n['budget_errors']} | {met} | "
            f"{found} | {possible} |"
        )
    return "\n".join(lines)
