"""corrections: what timed plans took (`tune`), kept beside the profile for later plans of the step.

The measured seconds of a plan divided by its predicted ones correct the costs of the form of the step
that it runs, whatever the budget. Forms that were not timed are corrected by the mean of those that
were, so that none looks faster for not having run.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from typing import Any

from vmem_jax.api.rivals import predicted_seconds
from vmem_jax.core.costs import Costs
from vmem_jax.core.params import PARAMS
from vmem_jax.core.plan import form_of
from vmem_jax.core.program import Program
from vmem_jax.core.tuning import scaled
from vmem_jax.profile.kept import Kept, positive
from vmem_jax.profile.store import identity
from vmem_jax.search.attempt import Attempt
from vmem_jax.techniques import StepContext

MOST = 256
"""Steps in one file; the oldest is dropped first."""

Factors = dict[str, dict[str, float]]
"""Key of a step -> key of a form -> measured seconds by predicted ones."""


class Corrections(Kept[Factors]):
    """The file of one device."""

    kind = "corrections"
    schema = 1
    folder = "corrections"

    def nothing(self) -> Factors:
        return {}

    def merged(self, old: Factors, new: Factors) -> Factors:
        every = {key: each for key, each in old.items() if key not in new}
        every |= {key: {**old.get(key, {}), **each} for key, each in new.items()}
        return dict([*every.items()][-MOST:])

    def to_json(self, value: Factors) -> dict[str, Any]:
        return {"steps": value}

    def from_json(self, content: dict[str, Any]) -> Factors:
        return {
            str(key): {str(form): positive(factor) for form, factor in each.items()}
            for key, each in content["steps"].items()
        }


def keep(step: StepContext, ran: Sequence[tuple[Attempt, float]]) -> None:
    """Keeps what plans of `step` took: (plan, measured seconds of one call)."""
    if not _applies(step):
        return
    found: dict[str, float] = {}
    for attempt, measured in ran:
        if attempt.plan.options:  # the compiler's other kernels say nothing of the usual ones
            continue
        program, before = attempt.variant.program, _factor(step, attempt.variant.program)
        predicted = predicted_seconds(attempt)
        ratio = before * measured / predicted
        if 1 / PARAMS.corrected_times <= ratio <= PARAMS.corrected_times:
            found.setdefault(_form(program), ratio)
    if found:
        Corrections(identity(step.devices[0])).keep({_key(step): found})


def corrected(step: StepContext, program: Program, costs: Costs) -> Costs:
    """`costs` of `program`, a form of `step`, by what its plans took when they were timed."""
    factor = _factor(step, program)
    return costs if factor == 1.0 else scaled(costs, factor)


def known(step: StepContext) -> dict[str, float]:
    """Key of a form of `step` -> the factor of its costs, of those that were timed."""
    if not _applies(step):
        return {}
    load = lambda: Corrections(identity(step.devices[0])).load().get(_key(step), {})
    found: dict[str, float] = step.whole.cached("corrections", load)
    return found


def _applies(step: StepContext) -> bool:
    """Whether measured times count: as those of a profile do."""
    given = step.settings
    return step.target is None and given.machine is None and given.profile is not False


def _factor(step: StepContext, program: Program) -> float:
    factors = known(step)
    if not factors:
        return 1.0
    return factors.get(_form(program), statistics.geometric_mean(factors.values()))


def _key(step: StepContext) -> str:
    """The same in every process that plans the step by costs of the same origin."""
    whole = step.whole
    return _hash((whole.traced.captured.program.fingerprint, bool(whole.costs.sources)))


def _form(program: Program) -> str:
    return _hash((program.fingerprint, program.compressed, form_of(program)))


def _hash(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
