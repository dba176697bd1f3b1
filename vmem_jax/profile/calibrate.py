"""calibrate: the seconds of the steps that were not timed, from those that were. No JAX here."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Mapping, Sequence

from vmem_jax.core.costs import Costs, Machine, Source, analytic
from vmem_jax.core.program import Program, Step


class StepClass(enum.StrEnum):
    """Steps whose rooflines err alike."""

    CONVOLUTION = "convolution"
    PRODUCT = "matrix product"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    OTHER = "other"


def class_of(step: Step) -> StepClass:
    """The class of `step`, by its name and by whether XLA fuses it."""
    if step.op == "conv_general_dilated":
        return StepClass.CONVOLUTION
    if step.op == "dot_general":
        return StepClass.PRODUCT
    if not step.fusible:
        return StepClass.OTHER
    reduces = step.op.startswith(("reduce", "arg"))
    return StepClass.REDUCTION if reduces else StepClass.ELEMENTWISE


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of one distinct step on one device.

    Attributes:
      seconds: of one run, a median.
      source: MEASURED or SCALED.
      batch: the part of its batch that was timed, "32 of 256"; "" for the whole.
      what: the step for people, "conv_general_dilated bf16[32,56,56,64] bf16[3,3,64,64]".
    """

    seconds: float
    source: Source
    batch: str = ""
    what: str = ""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How much slower than its roofline each class of steps runs.

    Attributes:
      factors: seconds of the roofline × factor = seconds on the device.
      default: the factor of a class of which no step was measured.
      error: median relative error of factor × roofline on the measured steps, each with the
        factor that the others give; None for fewer than two.
    """

    factors: Mapping[StepClass, float]
    default: float
    error: float | None


def calibrate(samples: Sequence[tuple[StepClass, float, float]]) -> Calibration:
    """Least squares in log space, one factor a class: the geometric mean of the ratios.

    Args:
      samples: (class, seconds by the roofline, seconds measured) of each distinct step.
    """
    ratios: dict[StepClass, list[float]] = {}
    for kind, predicted, measured in samples:
        ratios.setdefault(kind, []).append(math.log(measured / predicted))
    every = [r for rs in ratios.values() for r in rs]
    errors = []
    for rs in ratios.values():
        for r in rs:
            own = len(rs) > 1  # a class of one is predicted from the other classes
            total, count = (sum(rs), len(rs)) if own else (sum(every), len(every))
            if count > 1:
                errors.append(abs(math.exp((total - r) / (count - 1) - r) - 1))
    return Calibration(
        {kind: math.exp(statistics.fmean(rs)) for kind, rs in ratios.items()},
        math.exp(statistics.fmean(every)) if every else 1.0,
        statistics.median(errors) if errors else None,
    )


def costs_from(
    program: Program,
    machine: Machine,
    keys: Sequence[str],
    timings: Mapping[str, Timing],
    folded: frozenset[int] = frozenset(),
) -> Costs:
    """Costs of `program`: what was timed, and the calibrated roofline for the rest.

    Args:
      keys: of every step; equal steps have equal keys, and "" is a step that cannot be timed.
      timings: by key.
      folded: steps that their readers do in the same kernel, and that were timed with them.
    """
    roofline = analytic(program, machine)
    first = {key: s for s, key in reversed([*enumerate(keys)]) if key in timings}
    samples = [
        (class_of(program.steps[s]), roofline.seconds[s], timings[key].seconds)
        for key, s in first.items()
        if timings[key].source is Source.MEASURED and s not in folded
    ]
    calibration = calibrate(samples)
    seconds: list[float] = []
    sources: list[Source] = []
    for s, key in enumerate(keys):
        timing = timings.get(key)
        if s in folded:
            seconds.append(0.0)
            sources.append(Source.MEASURED)
        elif timing is not None:
            seconds.append(timing.seconds)
            sources.append(timing.source)
        else:
            kind = class_of(program.steps[s])
            factor = calibration.factors.get(kind, calibration.default)
            seconds.append(roofline.seconds[s] * factor)
            sources.append(Source.CALIBRATED if samples else Source.ROOFLINE)
    return Costs(
        machine.name,
        tuple(seconds),
        link=roofline.link,
        sources=tuple(sources),
        error=calibration.error,
    )
