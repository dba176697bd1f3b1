"""The events of a search, line by line, for `explain`, errors and tests."""

from __future__ import annotations

import dataclasses
import enum

from absl import logging


class What(enum.StrEnum):
    """What happened to a variant.

    PLANNED: a plan was made that is predicted to fit.
    OVER: no plan is predicted to fit.
    COMPILED: a plan was compiled and fits.
    MISSED: a plan was compiled and needs more than the budget.
    DROPPED: it cannot be planned, compiled or run here.
    SKIPPED: an allowed technique is of no use to this step.
    PRUNED: no plan of it can be faster than the best one by the tolerance.
    """

    PLANNED = enum.auto()
    OVER = enum.auto()
    COMPILED = enum.auto()
    MISSED = enum.auto()
    DROPPED = enum.auto()
    SKIPPED = enum.auto()
    PRUNED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Line:
    """One event of a search.

    Attributes:
      what: what happened.
      variant: the name of the variant, or of the technique.
      seconds: predicted seconds of one step; 0 without a plan.
      nbytes: the need of the plan in bytes, compiled or else predicted; 0 if unknown.
      why: the reason, for people.
    """

    what: What
    variant: str
    seconds: float = 0.0
    nbytes: int = 0
    why: str = ""

    def __str__(self) -> str:
        facts = [f"{self.variant}: {self.what.value}"]
        if self.nbytes:
            facts.append(f"{self.nbytes / 2**20:.2f} MiB")
        if self.seconds:
            facts.append(f"{self.seconds * 1e3:.2f} ms predicted")
        return ", ".join(facts) + (f": {self.why}" if self.why else "")


@dataclasses.dataclass
class SearchLog:
    """The lines of one search, and how much it did.

    Attributes:
      step: the name of the user's step.
      plans: plans that policies made.
    """

    step: str = "step"
    lines: list[Line] = dataclasses.field(default_factory=list)
    plans: int = 0

    def add(
        self, what: What, variant: str, seconds: float = 0.0, nbytes: int = 0, why: str = ""
    ) -> None:
        self.lines.append(Line(what, variant, seconds, nbytes, why))
        logging.info("%s: %s", self.step, self.lines[-1])

    def of(self, *whats: What) -> list[Line]:
        """The lines of these kinds."""
        return [line for line in self.lines if line.what in whats]

    @property
    def skipped(self) -> dict[str, str]:
        """Techniques that are allowed and not used by any variant, and why."""
        return {line.variant: line.why for line in self.of(What.SKIPPED)}
