"""Costs: the seconds of every step, from a roofline of the machine."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterator, Mapping

from vmem_jax.core.convolution import Configuration, Convolution
from vmem_jax.core.program import Program, Step

_UNALIGNED = 10
"""How much slower unaligned shapes are. An H200 runs ResNet-50's 3-channel stem (bf16, batch 256,
60 GFLOP) in 1.78 ms: 34 TFLOP/s, where aligned convolutions reach about 390."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a device can do, as achieved, not as advertised.

    Attributes:
      name: the device.
      flops: floating-point operations a second by dtype, "" for all others.
      bandwidth: device memory, bytes a second.
      launch: seconds that every kernel costs at least.
      memory: device memory, bytes.
      link_out: device to pinned host memory, bytes a second.
      link_in: pinned host memory to device, bytes a second.
      link_both: in total, where both directions are busy, bytes a second.
      link_delay: seconds by which a step starts later while something is copied.
      convolutions: operations a second of convolutions by dtype; `flops` for those that it lacks.
      pinning: seconds that pinning a byte of host memory takes. 2 GiB took 1.2 s beside an H200.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    memory: int
    link_out: float = 25e9
    link_in: float = 25e9
    link_both: float = 45e9
    link_delay: float = 0.0
    convolutions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    pinning: float = 1.2 / 2**31

    def seconds(self, step: Step) -> float:
        """Roofline (Williams et al., CACM 2009): max(flops / rate, bytes / bandwidth) + launch, for
        each time that it runs. A loop takes what the steps of its body take in all iterations, and
        what it takes to cut slices out of stacks and to put them there."""
        if step.body:
            inside = step.length * sum(map(self.seconds, step.body))
            return step.times * (inside + step.nbytes / self.bandwidth)
        rate = self.flops.get(step.dtype, self.flops[""])
        if step.op in ("conv_general_dilated", "micro_convolution"):
            rate = self.convolutions.get(step.dtype, rate)
        if not step.aligned:
            rate /= _UNALIGNED
        once = max(step.flops / rate, step.nbytes / self.bandwidth) + self.launch
        return step.times * once

    def convolution_seconds(self, convolution: Convolution) -> float:
        """The same roofline for one convolution."""
        dtype = "" if convolution.strict else convolution.dtype
        rate = self.convolutions.get(dtype, self.flops.get(dtype, self.flops[""]))
        by_flops, by_nbytes = convolution.flops / rate, convolution.nbytes / self.bandwidth
        return max(by_flops, by_nbytes) + self.launch


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


# An H200 as `vmem-jax profile` measured it (JAX 0.11.2, cuDNN 9.19). Its convolutions run at 710
# TFLOP/s where they are large and square, and at some 560 in whole training steps (VGG, ResNet).
# Its steps start later beside copies, by 1 µs (VGG-116) to 3 µs (ResNet-152): by so much plans with
# transfers take longer than was predicted without it (docs/benchmarks.md, Transfers).
_H200 = Machine(
    "h200",
    flops={
        "bfloat16": 748e12,
        "float16": 727e12,
        "float32": 377e12,  # TF32, which JAX's default precision uses on these cards
        "float64": 33.5e12,
        "": 49.3e12,
    },
    bandwidth=3.1e12,
    launch=1e-6,
    memory=143771 * 2**20,
    link_out=55.3e9,
    link_in=55.3e9,
    link_both=97.7e9,
    link_delay=2e-6,
    convolutions={"bfloat16": 560e12, "float16": 560e12, "float32": 280e12},
    pinning=2.8e-10,
)


def _like_h200(
    name: str, tensor: float, fp32: float, bandwidth: float, memory: int, link: float = 1.0
) -> Machine:
    """A card that was not measured: the share of its data sheet that an H200 reaches of its own.

    Args:
      tensor, fp32: bfloat16 and strict float32, operations a second.
      link: as a share of PCIe 5 x16.
    """
    tensor, fp32, bandwidth = tensor / 990e12, fp32 / 67e12, bandwidth / 4.8e12
    strict = ("float64", "")
    share = {d: fp32 if d in strict else tensor for d in _H200.flops}
    return dataclasses.replace(
        _H200,
        name=name,
        flops={d: rate * share[d] for d, rate in _H200.flops.items()},
        bandwidth=_H200.bandwidth * bandwidth,
        memory=memory,
        link_out=_H200.link_out * link,
        link_in=_H200.link_in * link,
        link_both=_H200.link_both * link,
        convolutions={d: rate * tensor for d, rate in _H200.convolutions.items()},
    )


MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        _H200,
        _like_h200("a100", 312e12, 19.5e12, 2.0e12, 80 * 10**9, 0.5),
        _like_h200("h100", 990e12, 67e12, 3.35e12, 80 * 10**9),
        _like_h200("b200", 2250e12, 80e12, 8.0e12, 180 * 10**9),
        _like_h200("rtx6000pro", 500e12, 125e12, 1.79e12, 96 * 10**9),
        Machine("cpu", {"": 5e10}, 1e10, 1e-6, 16 * 2**30, 5e9, 5e9, 5e9),
    )
}
"""For devices that `vmem-jax profile` has not measured here."""


def machine_for(device_kind: str) -> Machine:
    """The machine of a JAX `device_kind` ("NVIDIA H200"), or the nearest: h200 for GPUs, cpu."""
    kind = device_kind.lower().replace(" ", "")
    for name, machine in MACHINES.items():
        if name in kind:
            return machine
    return MACHINES["h200" if "nvidia" in kind else "cpu"]
