"""store: what was measured, in one JSON file for each device and set of versions.

The files lie in the user's cache directory, or in `VMEM_JAX_CACHE`. A file that cannot be trusted
(damaged, not ours, of another device) is said and counts as absent: everything is measured again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging

from vmem_jax.core.costs import Machine, Source
from vmem_jax.profile.calibrate import Timing

SCHEMA = 2
"""Of the files; and of the keys of steps, which it has to change with."""

VARIABLE = "VMEM_JAX_CACHE"

_LIBRARIES = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas")
"""Packages whose kernels JAX runs; their versions are no part of jaxlib's."""


_DRIVER = Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a measurement holds for.

    Attributes:
      device: its kind; for a CPU the processor and the cores that this process has.
      versions: of everything that decides which code runs on it.
    """

    device: str
    versions: Mapping[str, str]

    @property
    def file_name(self) -> str:
        text = json.dumps([SCHEMA, self.device, sorted(self.versions.items())])
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:60]
        return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


@dataclasses.dataclass
class Measured:
    """What a file holds.

    Attributes:
      machine: its rates; None where they were not measured.
      steps: timings of distinct steps, by key.
    """

    machine: Machine | None = None
    steps: dict[str, Timing] = dataclasses.field(default_factory=dict)


def identity(device: jax.Device) -> Identity:
    """What measurements on `device` hold for, in this process."""
    name = device.device_kind
    if device.platform == "cpu":
        name = f"{_processor()}, {_cores()} cores"
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


def cache_directory() -> Path:
    """`VMEM_JAX_CACHE`, or the user's cache directory by the system's rules."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_cache_dir("vmem_jax"))


class Store:
    """The file of one device. Any number of processes may read and write it at once."""

    def __init__(self, of: Identity, directory: Path | None = None) -> None:
        """The store of `of` in `directory` (default: `cache_directory()`); touches no file."""
        self.identity = of
        self.path = (directory or cache_directory()) / of.file_name

    def load(self) -> Measured:
        """What the file holds; nothing where there is none, or none that can be trusted."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Measured()
        except (OSError, UnicodeDecodeError) as error:
            return self._distrust(f"cannot be read ({error})")
        try:
            content = json.loads(text)
        except ValueError as error:
            return self._distrust(f"is damaged ({error})")
        if not isinstance(content, dict) or content.get("format") != "vmem_jax profile":
            return self._distrust("is no profile of vmem_jax")
        if content.get("schema") != SCHEMA:
            return self._distrust(f"has schema {content.get('schema')!r}, not {SCHEMA}")
        if content.get("device") != self.identity.device:
            return self._distrust(
                f"is of another device ({content.get('device')!r}, not {self.identity.device!r})"
            )
        if content.get("versions") != dict(self.identity.versions):
            return self._distrust("is of other versions")
        try:
            return Measured(_machine_from(content["machine"]), _steps_from(content["steps"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return self._distrust(f"is damaged ({type(error).__name__}: {error})")

    def add(self, measured: Measured) -> None:
        """Adds `measured` to the file. Of what both have, the new holds; nothing else is lost.

        Raises:
          OSError: the directory cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path.with_suffix(".lock")):
            old = self.load()
            content = {
                "format": "vmem_jax profile",
                "schema": SCHEMA,
                "device": self.identity.device,
                "versions": dict(self.identity.versions),
                "machine": _machine_to(measured.machine or old.machine),
                "steps": {
                    key: dataclasses.asdict(timing)
                    for key, timing in sorted({**old.steps, **measured.steps}.items())
                },
            }
            # Readers take no lock: they see the old file or the new one, never a part.
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, suffix=".tmp", delete=False
            ) as file:
                try:
                    json.dump(content, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, self.path)
                except BaseException:
                    os.unlink(file.name)
                    raise

    def _distrust(self, why: str) -> Measured:
        logging.warning("%s %s: it is ignored, and measured again", self.path, why)
        return Measured()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    with open(path, "w") as file:
        try:
            import fcntl
        except ImportError:  # not a POSIX system: two writers at once may lose the first's entries
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock up


def _machine_to(machine: Machine | None) -> dict[str, Any] | None:
    return None if machine is None else dataclasses.asdict(machine)


def _machine_from(content: Any) -> Machine | None:
    if content is None:
        return None
    machine = Machine(**content)
    rates = [*machine.flops.values(), *machine.convolutions.values(), machine.bandwidth]
    rates += [machine.link_out, machine.link_in, machine.link_both, machine.memory]
    for number in (*rates, machine.launch, machine.pinning):
        _positive(number)
    machine.flops[""]
    return machine


def _steps_from(content: Any) -> dict[str, Timing]:
    steps = {}
    for key, fields in content.items():
        timing = Timing(**fields)
        source = Source(timing.source)
        if source not in (Source.MEASURED, Source.SCALED):
            raise ValueError(f"step {key} is {source.value}")
        steps[key] = dataclasses.replace(timing, seconds=_positive(timing.seconds), source=source)
    return steps


def _positive(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{number!r} is no number")
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{number} is not positive and finite")
    return number


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


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
