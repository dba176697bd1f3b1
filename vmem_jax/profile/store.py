"""store: the profile of one device: its rates and the timings of steps, kept in a file."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax

from vmem_jax.core.costs import Source
from vmem_jax.core.machine import Machine
from vmem_jax.profile.calibrate import Timing
from vmem_jax.profile.kept import Identity, Kept, positive

SCHEMA = 3
"""Of the files; and of the keys of steps, which it has to change with."""

_LIBRARIES = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas")
"""Packages whose kernels JAX runs; their versions are no part of jaxlib's."""


_DRIVER = Path("/proc/driver/nvidia/version")


@dataclasses.dataclass
class Measured:
    """The contents of a file.

    Attributes:
      machine: the device's rates; None if they were not measured.
      steps: key -> timing of a distinct step.
    """

    machine: Machine | None = None
    steps: dict[str, Timing] = dataclasses.field(default_factory=dict)


def identity(device: jax.Device) -> Identity:
    """The device and versions for which measurements of this process are valid."""
    name = device.device_kind
    if device.platform == "cpu":
        name = f"{_processor()}, {cores()} cores"
    client = device.client
    versions = {
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "xla": client.platform_version,
    }
    if device.platform == "gpu":
        versions |= {package: found for package in _LIBRARIES if (found := _version(package))}
        if _DRIVER.exists():
            versions["driver"] = _DRIVER.read_text().splitlines()[0]
    if flags := os.environ.get("XLA_FLAGS"):
        versions["XLA_FLAGS"] = flags
    return Identity(name, versions)


class Store(Kept[Measured]):
    """The file of one device."""

    kind = "profile"
    schema = SCHEMA

    def nothing(self) -> Measured:
        return Measured()

    def merged(self, old: Measured, new: Measured) -> Measured:
        return Measured(new.machine or old.machine, {**old.steps, **new.steps})

    def to_json(self, value: Measured) -> dict[str, Any]:
        steps = {key: dataclasses.asdict(timing) for key, timing in sorted(value.steps.items())}
        return {"machine": _machine_to(value.machine), "steps": steps}

    def from_json(self, content: dict[str, Any]) -> Measured:
        return Measured(_machine_from(content["machine"]), _steps_from(content["steps"]))


def _machine_to(machine: Machine | None) -> dict[str, Any] | None:
    return None if machine is None else dataclasses.asdict(machine)


def _machine_from(content: Any) -> Machine | None:
    if content is None:
        return None
    machine = Machine(**content)
    rates = [*machine.flops.values(), *machine.convolutions.values(), machine.bandwidth]
    rates += [machine.link_out, machine.link_in, machine.link_both, machine.memory]
    for number in (*rates, machine.launch, machine.pinning):
        positive(number)
    machine.flops[""]
    for delay in (machine.link_delay, machine.slice_start):
        if not 0 <= delay < 1:
            raise ValueError(f"a delay of {delay} s")
    return machine


def _steps_from(content: Any) -> dict[str, Timing]:
    steps = {}
    for key, fields in content.items():
        timing = Timing(**fields)
        source = Source(timing.source)
        if source not in (Source.MEASURED, Source.SCALED):
            raise ValueError(f"step {key} is {source.value}")
        steps[key] = dataclasses.replace(timing, seconds=positive(timing.seconds), source=source)
    return steps


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    """The processor's name: JAX calls every CPU "cpu"."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
