"""calibrate: predicts steps that were not timed from those that were, without JAX."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Mapping, Sequence

from vmem_jax.core.costs import Costs, Source, analytic
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Program, Step


class StepClass(enum.StrEnum):
    """A class of steps whose rooflines have similar errors."""

    CONVOLUTION = "convolution"
    PRODUCT = "matrix product"
    FUSED = "elementwise or reduction"
    OTHER = "other"


def class_of(step: Step) -> StepClass:
    """The class of `step`, by its name and by whether XLA fuses it."""
    if step.op == "conv_general_dilated":
        return StepClass.CONVOLUTION
    if step.op == "dot_general":
        return StepClass.PRODUCT
    return StepClass.FUSED if step.fusible else StepClass.OTHER


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of one distinct step, or of neighbours together, on one device.

    Attributes:
      seconds: the median seconds of one run.
      source: MEASURED or SCALED.
      batch: the part of its batch that was timed, "32 of 256"; "" for the whole.
      what: a description for people, "conv_general_dilated bf16[32,56,56,64] bf16[3,3,64,64]".
    """

    seconds: float
    source: Source
    batch: str = ""
    what: str = ""


_DOUBT = 5
"""The weight, in measured steps, of a factor of 1 for classes without measured steps: the time of one
pooling says next to nothing about convolutions."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The factors by which classes of steps are slower than their rooflines.

    Attributes:
      factors: class -> factor; seconds of the roofline × factor = seconds on the device.
      default: the factor of a class without measured steps: that of all others, drawn towards 1 if
        these are few.
      error: median relative error of factor × roofline on the measured steps, each with the factor of
        the other steps; None for fewer than two.
    """

    factors: Mapping[StepClass, float]
    default: float
    error: float | None


def calibrate(samples: Sequence[tuple[StepClass, float, float]]) -> Calibration:
    """Fits one factor per class by least squares in log space: the geometric mean of the ratios.

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
        math.exp(sum(every) / (len(every) + _DOUBT)),
        statistics.median(errors) if errors else None,
    )


def costs_from(
    program: Program,
    machine: Machine,
    alone: Sequence[str],
    together: Sequence[tuple[tuple[int, ...], str]],
    timings: Mapping[str, Timing],
    folded: frozenset[int] = frozenset(),
) -> Costs:
    """Costs of `program`: timings where there are any, else the calibrated roofline.

    The seconds of neighbours that were timed together are divided among them: a heavy step in
    proportion to its time alone, the others in proportion to their rooflines.

    Args:
      alone: the key of every step that is timed by itself; "" for the others.
      together: steps that are timed together, and their key. Equal ones have equal keys.
      timings: key -> timing.
      folded: steps that run inside their readers' kernels and were timed with them.
    """
    times = [step.times for step in program.steps]
    once = lambda seconds: [s / n for s, n in zip(seconds, times, strict=True)]
    # what is timed alone is not transposed for others, and what it adds is an argument
    bare = [dataclasses.replace(step, behind=0) for step in program.steps]
    roofline = once([machine.seconds(step) for step in bare])
    whole = once(analytic(program, machine).seconds)
    behind = [max(0.0, n - less) for n, less in zip(whole, roofline, strict=True)]
    kinds = [class_of(step) for step in program.steps]
    heavy = {s: timings[key] for s, key in enumerate(alone) if key in timings}
    samples: dict[str, tuple[StepClass, float, float]] = {}
    for s, timing in heavy.items():
        if timing.source is Source.MEASURED:
            samples.setdefault(alone[s], (kinds[s], roofline[s], timing.seconds))
    timed = [(steps, timings[key], key) for steps, key in together if key in timings]
    shared: dict[int, float] = {}
    for steps, timing, key in timed:
        weights = [heavy[s].seconds if s in heavy else roofline[s] for s in steps]
        scale = timing.seconds / sum(weights)
        shared |= {s: scale * weight for s, weight in zip(steps, weights, strict=True)}
        fused = [s for s in steps if kinds[s] is StepClass.FUSED]
        predicted = sum(roofline[s] for s in fused)
        if predicted and timing.source is Source.MEASURED:
            samples.setdefault(key, (StepClass.FUSED, predicted, sum(shared[s] for s in fused)))
    calibration = calibrate(list(samples.values()))
    rest = Source.CALIBRATED if samples else Source.ROOFLINE
    seconds = [
        roofline[s] * calibration.factors.get(kind, calibration.default) + behind[s]
        for s, kind in enumerate(kinds)
    ]
    sources = [rest] * len(seconds)
    for s, timing in heavy.items():
        seconds[s], sources[s] = timing.seconds + behind[s], timing.source
    for steps, timing, _ in timed:
        for s in steps:
            seconds[s], sources[s] = shared[s], timing.source
    for s in folded:
        seconds[s], sources[s] = 0.0, Source.MEASURED
    return Costs(
        machine.name,
        tuple(s * n for s, n in zip(seconds, times, strict=True)),
        link=analytic(program, machine).link,
        sources=tuple(sources),
        error=calibration.error,
    )
