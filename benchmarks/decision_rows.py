"""Rows of `decisions.py`, and what two files of them differ in."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import records


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was decided about one case, and what it took to decide it.

    Attributes:
      case: `decision_cases.Case.name`.
      outcome: "ok", or the error: failures are rows too.
      budget_nbytes: the budget in bytes; None where it is not known.
      digest: of what the plan does, 16 hexadecimal digits; of the lowest plan where none fits; ""
        where there is no plan.
      recomputed, transfers, sub_batches: of that plan, how many steps run again, how many buffers
        move, and in how many parts the batch runs.
      predicted_need, need: bytes that the plan was predicted to need, and that it compiled to.
      predicted_seconds: of one step.
      lowest: bytes of the lowest peak, where no plan fits.
      lowest_compiled: whether that is the compiler's figure.
      plans: how often a policy was asked for a plan.
      compiles: everything that was compiled, the step under plain jit included.
      policy_seconds: CPU seconds in these plans.
      planning_seconds: CPU seconds of all but lowering and compiling: those in plans, capturing the
        step, placing plans on the heap, rewriting the step.
      lowering_seconds, compile_seconds: CPU seconds of `jax.stages.Traced.lower` and
        `jax.stages.Lowered.compile`, of all threads.
      device: the card that it was compiled for.
      machine, versions, commit: as `records.origin` has them.
      seconds_commit: of the run that the CPU seconds are from, if it is another: those of a slower
        machine would hide that planning takes longer.
    """

    case: str
    outcome: str
    budget_nbytes: int | None = None
    digest: str = ""
    recomputed: int | None = None
    transfers: int | None = None
    sub_batches: int | None = None
    predicted_need: int | None = None
    need: int | None = None
    predicted_seconds: float | None = None
    lowest: int | None = None
    lowest_compiled: bool | None = None
    plans: int | None = None
    compiles: int | None = None
    policy_seconds: float | None = None
    planning_seconds: float | None = None
    lowering_seconds: float | None = None
    compile_seconds: float | None = None
    device: str = ""
    machine: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    commit: str = ""
    seconds_commit: str = ""

    @property
    def fits(self) -> bool:
        return self.outcome == "ok"

    @property
    def error(self) -> str:
        """The name of the error; "ok" without one."""
        return self.outcome.partition(":")[0]


Rows = Mapping[str, Decision]
"""By the names of their cases."""


def read(path: Path) -> dict[str, Decision]:
    rows = [Decision(**row) for row in records.lines(path)]
    return {row.case: row for row in rows}


def write(path: Path, rows: Iterable[Decision]) -> None:
    """Writes one JSON object a line; who ends the process meanwhile leaves the file as it was."""
    new = path.with_name(f".{path.name}")
    new.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    new.replace(path)


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """How much worse a figure may get, as a share of what it was.

    Attributes:
      seconds: the predicted seconds of each case.
      lowest: the lowest peak of each case that nothing fits.
      compiles: the sum of all compiles.
      planning: the sum of CPU seconds of planning; infinite to leave clocks out.
    """

    seconds: float = 0.01
    lowest: float = 0.01
    compiles: float = 0.0
    planning: float = 0.3


@dataclasses.dataclass(frozen=True)
class Change:
    """A figure that differs.

    Attributes:
      case: its name, or "all cases" for a sum.
      what: the figure.
      before, after: its values.
      worse: why that is not allowed; "" where it is.
    """

    case: str
    what: str
    before: Any
    after: Any
    worse: str = ""


_FIGURES = (
    "budget_nbytes",
    "digest",
    "recomputed",
    "transfers",
    "sub_batches",
    "predicted_need",
    "plans",
)
"""Fields that are shown where they differ, and may."""


DEFAULT = Tolerances()
"""What is not measured is the same each time. CPU seconds are not: with more other work on the
same two cores the plans of five cases took 26 % more."""


def changes(
    before: Rows, after: Rows, tolerances: Tolerances = DEFAULT, partial: bool = False
) -> list[Change]:
    """What differs between `after` and `before`, case by case, then the sums.

    Args:
      partial: only cases of both are compared; otherwise each that `after` lacks is an error.
    """
    found = [
        change
        for name in before
        if name in after
        for change in _of(before[name], after[name], tolerances)
    ]
    if not partial:
        lacks = "the case is missing"
        found += [Change(n, "row", "there", "missing", lacks) for n in before if n not in after]
    found += [Change(name, "row", "missing", "there") for name in after if name not in before]
    return found + _sums(before, after, tolerances)


def _of(before: Decision, after: Decision, tolerances: Tolerances) -> list[Change]:
    found = []

    def differs(what: str, worse: str = "") -> None:
        pair = getattr(before, what), getattr(after, what)
        if pair[0] != pair[1] or worse:
            found.append(Change(before.case, what, *pair, worse))

    if before.error != after.error:
        differs("outcome", "the budget is lost" if before.fits else "")
    over = after.fits and _exceeds(after.budget_nbytes, after.need, 0)
    differs("need", "over the budget" if over else "")
    limit = tolerances.lowest
    higher = not after.fits and _exceeds(before.lowest, after.lowest, limit)
    unnamed = not (before.fits or after.fits) and before.lowest is not None and after.lowest is None
    worse = f"the lowest peak rises by more than {limit:.1%}" if higher else ""
    differs("lowest", "the lowest peak is not known" if unnamed else worse)
    limit = tolerances.seconds
    slower = _exceeds(before.predicted_seconds, after.predicted_seconds, limit)
    slower = slower and before.fits and after.fits
    differs("predicted_seconds", f"slower by more than {limit:.1%}" if slower else "")
    for what in (*_FIGURES, "compiles"):
        differs(what)
    return found


def _sums(before: Rows, after: Rows, tolerances: Tolerances) -> list[Change]:
    both = [(before[name], after[name]) for name in before if name in after]
    limits = {
        "compiles": tolerances.compiles,
        "plans": math.inf,
        "planning_seconds": tolerances.planning,
        "policy_seconds": math.inf,
        "compile_seconds": math.inf,
    }
    found = []
    for what, limit in limits.items():
        pairs = [(getattr(a, what), getattr(b, what)) for a, b in both]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        old, new = (round(sum(each), 3) for each in zip(*known, strict=True)) if known else (0, 0)
        worse = f"the sum rises by more than {limit:.1%}" if _exceeds(old, new, limit) else ""
        if old != new:
            found.append(Change("all cases", f"sum of {what}", old, new, worse))
    return found


def _exceeds(before: float | None, after: float | None, tolerance: float) -> bool:
    return before is not None and after is not None and after > (1 + tolerance) * before


def table(found: Iterable[Change]) -> str:
    """`found` as lines of text: what is worse is named at the end of its line."""
    lines, last = [], None
    for change in found:
        if change.case != last:
            lines.append(last := change.case)
        text = f"  {change.what:22s} {_shown(change.before):>18s} -> {_shown(change.after):18s}"
        if _is_number(change.before) and _is_number(change.after) and change.before:
            text += f" {change.after / change.before - 1:+8.2%}"
        lines.append(text.rstrip() + (f"  WORSE: {change.worse}" if change.worse else ""))
    return "\n".join(lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:60]
