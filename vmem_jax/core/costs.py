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
    """What moves between device and pinned host memory, in bytes a second.

    Attributes:
      out: device to host, alone.
      into: host to device, alone.
      both: in total, where both directions are busy.
      delay: seconds by which a step starts later while either is.
    """

    out: float
    into: float
    both: float
    delay: float = 0.0


class Source(enum.StrEnum):
    """Where the seconds of a step come from.

    MEASURED: the step was timed alone on the device.
    SCALED: it was too large for that, and was timed on a part of its batch.
    CALIBRATED: the roofline, times a factor that the measured steps of its class gave.
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
      seconds: of every step of the program.
      link: None where nothing can be moved.
      sources: where each step's seconds come from; empty where all are the roofline's.
      error: median relative error of the calibrated roofline on the measured steps, each predicted
        from the others; None where nothing was measured, or too little to tell.
      convolutions: for steps that are convolutions what can do them, XLA's own first; empty where
        that is not known, or not wanted.
    """

    machine: str
    seconds: tuple[float, ...]
    link: Link | None = None
    sources: tuple[Source, ...] = ()
    error: float | None = None
    convolutions: Mapping[int, tuple[Configuration, ...]] = dataclasses.field(default_factory=dict)


def analytic(program: Program, machine: Machine) -> Costs:
    """Costs of `program` on `machine` by its roofline."""
    link = Link(machine.link_out, machine.link_in, machine.link_both, machine.link_delay)
    return Costs(machine.name, tuple(machine.seconds(s) for s in program.steps), link)


def of_parts(program: Program, machine: Machine, whole: Program, costs: Costs) -> Costs:
    """Costs of `program`, which runs in sub-batches: each step is as much above the roofline of
    `machine` as the same step of the whole batch, and what is none of these as much as all of them.

    The same step is the n-th of its layer, phase and operation in either.

    Args:
      whole: with the batch as a whole.
      costs: of that.
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
    """What each step is, whatever the size of its batch."""
    seen: collections.Counter[tuple[object, ...]] = collections.Counter()
    for step in program.steps:
        key = step.layer, step.phase, step.op
        yield *key, seen[key]
        seen[key] += 1
