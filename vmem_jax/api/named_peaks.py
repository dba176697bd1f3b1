"""named_peaks: the plans behind the lowest peaks that errors named, kept for the next process.

Somebody who reads a BudgetError edits the budget and starts the program again. The search of that
process has another budget, so it may not come across the plan that the error was about: it reads it
here, and the lowest peak that was named is met.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from vmem_jax.core.plan import FORMAT, Plan
from vmem_jax.errors import PlanError
from vmem_jax.profile.kept import Kept
from vmem_jax.profile.store import identity
from vmem_jax.techniques import StepContext

MOST = 64
"""Steps in one file, whose plans have some kilobytes each; the oldest is dropped first."""

Peaks = dict[str, tuple[Plan, int]]
"""Key of a step -> the plan with its lowest peak, and what that compiled to in bytes."""


class NamedPeaks(Kept[Peaks]):
    """The file of one device."""

    kind = "lowest peaks"
    schema = FORMAT
    folder = "lowest_peaks"

    def nothing(self) -> Peaks:
        return {}

    def merged(self, old: Peaks, new: Peaks) -> Peaks:
        every = {**{key: each for key, each in old.items() if key not in new}, **new}
        return dict([*every.items()][-MOST:])

    def to_json(self, value: Peaks) -> dict[str, Any]:
        return {"steps": {key: [plan.to_json(), need] for key, (plan, need) in value.items()}}

    def from_json(self, content: dict[str, Any]) -> Peaks:
        try:
            return {
                key: (Plan.from_json(text), int(need))
                for key, (text, need) in content["steps"].items()
            }
        except PlanError as error:
            raise ValueError(str(error)) from None


def key_of(step: StepContext) -> str:
    """The key of `step`: the same in every process that plans it with the same options."""
    settings = step.settings
    options = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.name not in ("name", "signature", "budget", "plan")
    }
    program = step.traced.captured.program.fingerprint
    facts = repr((program, options, step.target, step.inlined))
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def keep(step: StepContext, plan: Plan, need: int) -> None:
    """Keeps the plan that compiled to `need` bytes, the lowest peak of `step`."""
    peaks = {key_of(step): (dataclasses.replace(plan, budget=None), need)}
    NamedPeaks(identity(step.devices[0])).keep(peaks)


def known(step: StepContext) -> list[tuple[Plan, int]]:
    """The plan with the lowest peak that an error named for `step`, and its bytes; or nothing."""
    found = NamedPeaks(identity(step.devices[0])).load().get(key_of(step))
    return [found] if found else []
