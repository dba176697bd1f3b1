"""Costs: the seconds of every step, from a roofline of the machine."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterator, Mapping

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Program


@dataclasses.dataclass(frozen=True)
class Link:
    """The bandwidth between device and pinned host memory, in bytes a second.

    Attributes:
      out: device to host, alone.
      into: host to device, alone.
      both: the total while both directions are busy.
      delay: seconds by which a step starts later while a direction is busy.
      slice_start: seconds that the host takes to start a copy of a slice in a loop.
    """

    out: float
    into: float
    both: float
    delay: float = 0.0
    slice_start: float = 0.0


class Source(enum.StrEnum):
    """The origin of a step's seconds.

    MEASURED: the step was timed on the device.
    SCALED: it was too large for that, and was timed on a part of its batch.
    CALIBRATED: the roofline times a factor from the measured steps of its class.
    ROOFLINE: the roofline alone.
    """

    MEASURED = "measured"
    SCALED = "scaled"
    CALIBRATED = "calibrated"
    ROOFLINE = "roofline"


@dataclasses.dataclass(frozen=True)
class Costs:
    """The seconds of every step of one program, and the link that its transfers share.

    Attributes:
      machine: the device.
      seconds: the seconds of every step.
      link: the link to host memory; None if nothing can be moved.
      sources: the origin of each step's seconds; empty if all are the roofline's.
      error: median relative error of the calibrated roofline on the measured steps, each predicted
        from the others; None if too little was measured.
      convolutions: step -> configurations that can run the convolution, XLA's own first; empty if
        they are not known or not wanted.
    """

    machine: str
    seconds: tuple[float, ...]
    link: Link | None = None
    sources: tuple[Source, ...] = ()
    error: float | None = None
    convolutions: Mapping[int, tuple[Configuration, ...]] = dataclasses.field(default_factory=dict)


def analytic(program: Program, machine: Machine) -> Costs:
    """Costs of `program` on `machine` by its roofline."""
    rates = machine.link_out, machine.link_in, machine.link_both
    link = Link(*rates, machine.link_delay, machine.slice_start)
    return Costs(machine.name, tuple(machine.seconds(s) for s in program.steps), link)


def of_parts(program: Program, machine: Machine, whole: Program, costs: Costs) -> Costs:
    """Costs of `program`, which runs in sub-batches, from those of the whole batch.

    Each step takes its roofline on `machine`, times the ratio of seconds to roofline of the same step
    of the whole batch; a step that has no counterpart takes the ratio over all steps. The counterpart
    is the n-th step of the same layer, phase and operation.

    Args:
      whole: the program with the batch as a whole.
      costs: the costs of `whole`.
    """
    mine, theirs = analytic(program, machine), analytic(whole, machine).seconds
    all_together = sum(costs.seconds) / sum(theirs) if sum(theirs) else 1.0
    known = dict(zip(_keys(whole), zip(costs.seconds, theirs, strict=True), strict=True))
    seconds = []
    for key, roofline in zip(_keys(program), mine.seconds, strict=True):
        measured, predicted = known.get(key, (all_together, 1.0))
        seconds.append(roofline * (measured / predicted if predicted else all_together))
    return dataclasses.replace(
        mine,
        machine=costs.machine,
        seconds=tuple(seconds),
        sources=(Source.CALIBRATED,) * len(program.steps) if costs.sources else (),
    )


def _keys(program: Program) -> Iterator[tuple[object, ...]]:
    """For each step a key that does not depend on the size of its batch."""
    seen: collections.Counter[tuple[object, ...]] = collections.Counter()
    for step in program.steps:
        key = step.layer, step.phase, step.op
        yield *key, seen[key]
        seen[key] += 1
