"""Timed training steps beside plain jit's, and grids of them.

A row is compared with the plain row before it in its file, which ran in the same process.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path

import records
from cells import failure, grid, number
from records import Record

RESULTS = Path(__file__).parent / "results"
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Compared:
    """A row and plain jit's of the same process."""

    row: Record
    plain: Record

    @property
    def step(self) -> str:
        row = self.row
        strict = (
            {"highest": " strict", "": " TF32"}[row.precision] if row.dtype == "float32" else ""
        )
        return f"{row.model}({row.batch}) {row.dtype}{strict}"

    @property
    def how(self) -> str:
        return f"`{self.row.variant}`"

    @property
    def asked(self) -> str:
        row = self.row
        return row.asked if "B" in row.asked else f"{row.budget:.0%}" if row.budget else ""

    @property
    def ratio(self) -> str:
        if self.row.outcome != "ok":
            return failure(self.row)
        own, plain = (statistics.median(each.step_seconds) for each in (self.row, self.plain))
        return f"{own / plain:.3f}"

    @property
    def peak(self) -> str:
        return number(self.row.need / GIB) if self.row.need else ""

    @property
    def share(self) -> str:
        return f"{self.row.need / self.plain.need:.0%}" if self.row.need and self.plain.need else ""

    @property
    def moved(self) -> str:
        return number((self.row.moved_nbytes or 0) / GIB)

    @property
    def predicted(self) -> str:
        return number(1e3 * self.row.predicted_seconds) if self.row.predicted_seconds else ""

    @property
    def ms(self) -> str:
        steps = self.row.step_seconds
        return number(1e3 * statistics.median(steps)) if steps else ""


def compared(name: str) -> list[Compared]:
    """The rows of a file beside plain jit's, in its order."""
    plains: dict[tuple, Record] = {}
    found = []
    for row in records.read(RESULTS / f"{name}.jsonl"):
        key = row.model, row.batch, row.dtype, row.precision
        if row.variant == "plain":
            plains[key] = row
        elif not row.variant.endswith("without its transfers"):
            found.append(Compared(row, plains[key]))
    return found


def compared_steps(name: str, model: str) -> list[Compared]:
    """The rows of a file of `training_steps.py` that are of that model and have no note, of the last
    commit that timed it so, largest budgets first, then other frameworks'; the last of each stands.
    """
    last: dict[str, Compared] = {}
    plain: Record | None = None
    rows = (r for r in records.lines(RESULTS / f"{name}.jsonl") if r["model"] == model)
    lines = [r for r in rows if "note" not in r and "ms" in r]
    network, _, dtype = model.partition("_")
    for line in lines:
        if line["commit"] != lines[-1]["commit"]:
            continue
        way = line["way"]
        share = float(way) if way.replace(".", "").isdigit() else None
        row = Record(
            model=network,
            batch=line["batch"],
            image=0,
            dtype=dtype or "bfloat16",
            optimizer="momentum",
            variant=way if share is None else "auto",
            budget=share,
            outcome="ok",
            need=int(line["gib"] * GIB),
            step_seconds=(line["ms"] / 1e3,),
            commit=line["commit"],
        )
        if way == "plain":
            plain = row
        elif plain is not None:
            last[way] = Compared(row, plain)
    is_other = lambda row: row.variant.startswith("torch")
    return sorted(last.values(), key=lambda each: (is_other(each.row), -(each.row.budget or 1)))


def latest(rows: Iterable[Compared]) -> list[Compared]:
    """The last row of each step, variant and budget, by step."""
    last = {(each.step, each.row.variant, each.asked): each for each in rows}
    steps = list(dict.fromkeys(step for step, *_ in last))
    return sorted(last.values(), key=lambda each: steps.index(each.step))


def lines_of(rows: Iterable[Compared], *columns: str) -> str:
    """A grid with these columns: what COLUMNS calls them."""
    shown = ("step", "how", "asked", "ratio", "peak", "share", *columns)
    return "\n" + grid(
        [COLUMNS[name] for name in shown],
        ([_column(each, name) for name in shown] for each in rows),
    )


COLUMNS = {
    "step": "step (batch)",
    "how": "variant",
    "asked": "budget",
    "ms": "ms",
    "ratio": "time / plain",
    "peak": "peak, GiB",
    "share": "of plain",
    "moved": "moved, GiB",
    "sub_batches": "sub-batches",
    "divided": "by cuDNN",
    "recomputed": "recomputed",
    "compressed": "compressed",
    "predicted": "ms predicted",
    "compiles": "compiles",
    "commit": "commit",
}


def _column(each: Compared, name: str) -> str:
    own = getattr(each, name, None)
    if own is None:
        value = getattr(each.row, name)
        own = "" if value is None else value[:7] if name == "commit" else str(value)
    return own
