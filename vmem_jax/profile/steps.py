"""steps: times each distinct part of a program alone, the longest first, until the time is over."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
from absl import logging

from vmem_jax.capture.capture import Captured
from vmem_jax.capture.primitives import nbytes
from vmem_jax.core.costs import Costs, Source, analytic
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Program
from vmem_jax.devices.device import free_nbytes
from vmem_jax.policy.order import canonical_order
from vmem_jax.profile.calibrate import Timing, costs_from
from vmem_jax.profile.isolate import Isolated, folded_steps, isolate, smaller
from vmem_jax.profile.neighbours import neighbours
from vmem_jax.profile.timing import (
    Dispatch,
    Operands,
    compile_step,
    copies_of,
    dispatch_seconds,
    time_step,
)

SECONDS = 90.0
"""How long timing a program's steps may take; profiling a model is to take under two minutes."""

_SHARE = 0.5
"""Of the free memory that one step's arguments and results may take: libraries want workspace."""

Progress = Callable[[int, int, str], None]
"""Called with how many distinct parts are done, of how many, and which one is next."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A unit of timing: a heavy step alone, or neighbours together.

    Attributes:
      steps: the steps of its first occurrence in the order.
      count: how often it occurs.
    """

    steps: tuple[int, ...]
    isolated: Isolated
    count: int


@dataclasses.dataclass(frozen=True)
class Distinct:
    """The distinct parts of one program.

    Attributes:
      alone: for every step the key of its own timing; "" if it is not timed by itself.
      together: neighbours and the key of their timing.
      parts: key -> part; equal parts have equal keys.
      folded: steps that run inside their readers' kernels.
      untimed: "step: why" for steps that cannot run alone.
    """

    alone: tuple[str, ...]
    together: tuple[tuple[tuple[int, ...], str], ...]
    parts: Mapping[str, Part]
    folded: frozenset[int]
    untimed: tuple[str, ...]

    def costs(self, program: Program, machine: Machine, timings: Mapping[str, Timing]) -> Costs:
        """Costs of `program`, whose parts these are: see `costs_from`."""
        return costs_from(program, machine, self.alone, self.together, timings, self.folded)


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """The result of timing a program's steps.

    Attributes:
      costs: the costs of every step, with their sources.
      distinct: the number of distinct parts: heavy steps, and neighbours together.
      measured: how many of them were timed whole, now or before.
      scaled: how many were timed on a part of the batch.
      calibrated: how many were not timed.
      reused: how many were timed before.
      untimed: "step: why" for steps that cannot be timed alone.
      seconds: the seconds that timing took.
    """

    costs: Costs
    distinct: int
    measured: int
    scaled: int
    calibrated: int
    reused: int
    untimed: tuple[str, ...]
    seconds: float


def distinct_parts(captured: Captured, platform: str) -> Distinct:
    """The distinct parts of `captured` on devices of `platform`."""
    program = captured.program
    folded = folded_steps(captured)
    parts: dict[str, Part] = {}
    untimed: dict[str, None] = {}

    def key_of(steps: tuple[int, ...]) -> str:
        isolated = isolate(captured, steps, folded, platform)
        if isolated.trouble:
            untimed[f"{program.steps[steps[0]].where}: {isolated.trouble}"] = None
            return ""
        known = parts.get(isolated.key, Part(steps, isolated, 0))
        parts[isolated.key] = dataclasses.replace(known, count=known.count + 1)
        return isolated.key

    heavy = [s for s, step in enumerate(program.steps) if not step.fusible and s not in folded]
    alone = {s: key_of((s,)) for s in heavy}
    apart = folded | {s for s, key in alone.items() if not key}
    # in the order of a plan, which puts an update behind its gradient
    groups = neighbours(program, canonical_order(program), apart)
    together = [(steps, key_of(steps)) for steps in groups]
    return Distinct(
        tuple(alone.get(s, "") for s in range(len(program.steps))),
        tuple((steps, key) for steps, key in together if key),
        parts,
        folded,
        tuple(untimed),
    )


def profile_steps(
    captured: Captured,
    machine: Machine,
    device: jax.Device,
    timings: MutableMapping[str, Timing],
    *,
    seconds: float = SECONDS,
    limit_nbytes: int | None = None,
    on_progress: Progress = lambda done, total, what: None,
    free_layouts: bool = True,
    workers: int | None = None,
) -> StepProfile:
    """Times the distinct parts of `captured` on `device` that `timings` lacks, and adds them to it.

    Parts are timed by the seconds that the roofline predicts for all their repetitions, the longest
    first. Parts for which time or memory is not enough are predicted by the calibrated roofline.

    Args:
      machine: the roofline.
      timings: key -> timing, from before; new timings are added as they are made.
      seconds: seconds after which no further part is timed.
      limit_nbytes: the most bytes of a step's arguments and results (default: half of the device's
        free memory).
      on_progress: called before every step and at the end.
      free_layouts: let the compiler choose the layouts of temporaries, as in the whole program.
      workers: threads that compile, never while a step is timed (default: half of the cores, 8 at
        most; 1 where the device is the CPU itself).
    """
    began = time.monotonic()
    found = distinct_parts(captured, device.platform)
    program = captured.program
    each = zip(analytic(program, machine).seconds, program.steps, strict=True)
    roofline = [seconds / step.times for seconds, step in each]
    expected = {key: sum(roofline[s] for s in part.steps) for key, part in found.parts.items()}
    missing = [key for key in found.parts if key not in timings]
    missing.sort(key=lambda key: expected[key] * found.parts[key].count, reverse=True)
    reused = len(found.parts) - len(missing)
    limit = _limit_nbytes(device) if limit_nbytes is None else limit_nbytes
    operands = Operands(device, limit)
    dispatch = dispatch_seconds(device) if missing else Dispatch()
    if workers is None:
        workers = 1 if device.platform == "cpu" else max(1, min(8, (os.cpu_count() or 1) // 2))
    compiler = _Compiler(device, free_layouts, workers)
    for done, key in enumerate(missing):
        part = found.parts[key]
        if time.monotonic() - began > seconds and not compiler.has(part.isolated):
            break  # what is compiled already is timed in no time
        on_progress(
            done, len(missing), f"{program.steps[part.steps[0]].layer}: {part.isolated.what}"
        )
        if done % (2 * workers) == 0 and workers > 1:
            soon = missing[done : done + 2 * workers]
            compiler.ahead([(found.parts[k].isolated, expected[k]) for k in soon], limit)
        timing = _time(
            part.isolated,
            operands,
            expected=expected[key],
            workspace=max(program.steps[s].workspace for s in part.steps),
            limit=limit,
            dispatch=dispatch,
            compiler=compiler,
        )
        if timing is not None:
            timings[key] = timing
    on_progress(len(missing), len(missing), "")
    costs = found.costs(program, machine, timings)
    sources = [timings[k].source for k in found.parts if k in timings]
    measured = sources.count(Source.MEASURED)
    scaled = sources.count(Source.SCALED)
    return StepProfile(
        costs=costs,
        distinct=len(found.parts),
        measured=measured,
        scaled=scaled,
        calibrated=len(found.parts) - measured - scaled,
        reused=reused,
        untimed=found.untimed,
        seconds=time.monotonic() - began,
    )


def _limit_nbytes(device: jax.Device) -> int:
    here = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    return int(_SHARE * free_nbytes([here]))


class _Compiler:
    """Compiles steps: several at once and before they are asked for, where that pays.

    Libraries are autotuned while a step compiles, which XLA does one at a time; the rest of a
    compilation is work for the host alone.
    """

    def __init__(self, device: jax.Device, free_layouts: bool, workers: int) -> None:
        self._device = device
        self._free_layouts = free_layouts
        self._workers = workers
        self._ready: dict[tuple[str, int], concurrent.futures.Future[Any]] = {}

    def ahead(self, steps: Sequence[tuple[Isolated, float]], limit_nbytes: int) -> None:
        """Compiles `steps`, each with the seconds that are expected of it, and waits for all."""
        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            self._ready = {}
            for isolated, expected in steps:
                if sum(map(nbytes, (*isolated.avals, *isolated.out_avals))) <= limit_nbytes:
                    copies = copies_of(isolated, expected, limit_nbytes)
                    self._ready[isolated.key, copies] = pool.submit(
                        compile_step, isolated, self._device, copies, self._free_layouts
                    )

    def has(self, isolated: Isolated) -> bool:
        """Whether `isolated` is compiled already."""
        return any(key == isolated.key for key, _ in self._ready)

    def __call__(self, isolated: Isolated, copies: int) -> Any:
        future = self._ready.pop((isolated.key, copies), None)
        if future is not None:
            return future.result()
        return compile_step(isolated, self._device, copies, self._free_layouts)


def _time(
    isolated: Isolated,
    operands: Operands,
    *,
    expected: float,
    workspace: int,
    limit: int,
    dispatch: Dispatch,
    compiler: Callable[[Isolated, int], Any],
) -> Timing | None:
    """The timing of one part, on a share of its batch where the whole does not fit."""
    room = limit - workspace
    need = sum(map(nbytes, (*isolated.avals, *isolated.out_avals)))
    options: Any = dict(limit_nbytes=limit, dispatch=dispatch, compiler=compiler)
    while True:
        current, part, batch = isolated, 1, 1
        if need > room:
            found = smaller(isolated, room)
            if found is None:
                logging.info("%s: too large to time", isolated.what)
                return None
            current, part, batch = found
        try:
            scale = batch // part
            taken = time_step(current, operands, expected=expected / scale, **options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                logging.warning("%s: not timed: %s", isolated.what, str(error).splitlines()[0])
                return None
            operands.clear()
            room = min(room, need // scale) // 2  # the compiler or a library took more: half of it
            continue
        source = Source.SCALED if scale > 1 else Source.MEASURED
        of = f"{part} of {batch}" if scale > 1 else ""
        return Timing(taken * scale, source, of, isolated.what)
