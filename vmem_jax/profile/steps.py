"""steps: times each distinct step of a program alone, largest first, until the time is up."""

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
from vmem_jax.core.costs import Costs, Machine, Source
from vmem_jax.profile.calibrate import Timing, costs_from
from vmem_jax.profile.isolate import Isolated, folded_steps, isolate, smaller
from vmem_jax.profile.timing import (
    Dispatch,
    Operands,
    compile_step,
    copies_of,
    dispatch_seconds,
    time_step,
)
from vmem_jax.prove.device import free_nbytes

SECONDS = 90.0
"""How long timing a program's steps may take; profiling a model is to take under two minutes."""

_SHARE = 0.5
"""Of the free memory that one step's arguments and results may take: libraries want workspace."""

Progress = Callable[[int, int, str], None]
"""Called with how many distinct steps are done, of how many, and which one is next."""


@dataclasses.dataclass(frozen=True)
class Distinct:
    """The distinct steps of one program.

    Attributes:
      keys: of every step, equal for equal steps; "" for what is not timed by itself.
      steps: by key, the first that has it.
      counts: by key, how many steps have it.
      folded: steps that run inside their readers' kernels.
      untimed: "step: why" for what cannot run alone.
    """

    keys: tuple[str, ...]
    steps: Mapping[str, tuple[int, Isolated]]
    counts: Mapping[str, int]
    folded: frozenset[int]
    untimed: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """What timing a program's steps gave.

    Attributes:
      costs: of every step, with where its seconds come from.
      distinct: how many distinct steps there are.
      measured: of those timed as they are, now or before; `scaled` on a part of the batch;
        `calibrated` not timed.
      reused: of those timed before.
      untimed: "step: why" for those that cannot be timed alone.
      seconds: that this took.
    """

    costs: Costs
    distinct: int
    measured: int
    scaled: int
    calibrated: int
    reused: int
    untimed: tuple[str, ...]
    seconds: float


def distinct_steps(captured: Captured, platform: str) -> Distinct:
    """The distinct steps of `captured` on devices of `platform`."""
    folded = folded_steps(captured)
    keys: list[str] = []
    steps: dict[str, tuple[int, Isolated]] = {}
    counts: dict[str, int] = {}
    untimed: dict[str, None] = {}
    for s, step in enumerate(captured.program.steps):
        if s in folded:
            keys.append("")
            continue
        isolated = isolate(captured, s, folded, platform)
        if isolated.trouble:
            untimed[f"{step.where}: {isolated.trouble}"] = None
            keys.append("")
            continue
        keys.append(isolated.key)
        steps.setdefault(isolated.key, (s, isolated))
        counts[isolated.key] = counts.get(isolated.key, 0) + 1
    return Distinct(tuple(keys), steps, counts, folded, tuple(untimed))


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
    """Times the distinct steps of `captured` on `device` that `timings` lacks, and adds them there.

    The order is by the seconds that the roofline predicts for all repetitions of a step together,
    longest first. What time or memory does not allow is predicted by the roofline, calibrated by
    what was timed.

    Args:
      machine: whose roofline that is.
      timings: by key, from before; gets the new ones as they are made.
      seconds: begin no further step after so long.
      limit_nbytes: for a step's arguments and results; default: half of the device's free memory.
      on_progress: called before every step and at the end.
      free_layouts: let the compiler choose the layouts of temporaries, as in the whole program.
      workers: threads that compile, never while a step is timed (default: half of the cores, 8 at
        most; 1 where the device is the CPU itself).
    """
    began = time.monotonic()
    found = distinct_steps(captured, device.platform)
    program = captured.program
    missing = [key for key in found.steps if key not in timings]
    missing.sort(
        key=lambda k: machine.seconds(program.steps[found.steps[k][0]]) * found.counts[k],
        reverse=True,
    )
    reused = len(found.steps) - len(missing)
    limit = _limit_nbytes(device) if limit_nbytes is None else limit_nbytes
    operands = Operands(device, limit)
    # The host is ahead of a GPU; the CPU's small programs run while they are dispatched.
    slow = missing and device.platform == "cpu"
    dispatch = dispatch_seconds(device) if slow else Dispatch()
    if workers is None:
        workers = 1 if device.platform == "cpu" else max(1, min(8, (os.cpu_count() or 1) // 2))
    compiler = _Compiler(device, free_layouts, workers)
    for done, key in enumerate(missing):
        if time.monotonic() - began > seconds:
            break
        s, isolated = found.steps[key]
        step = program.steps[s]
        on_progress(done, len(missing), f"{step.layer}: {step.op}")
        if done % (2 * workers) == 0 and workers > 1:
            soon = [found.steps[k] for k in missing[done : done + 2 * workers]]
            compiler.ahead([(i, machine.seconds(program.steps[s])) for s, i in soon], limit)
        timing = _time(
            isolated,
            operands,
            expected=machine.seconds(step),
            workspace=step.workspace,
            limit=limit,
            dispatch=dispatch,
            compiler=compiler,
        )
        if timing is not None:
            timings[key] = timing
    on_progress(len(missing), len(missing), "")
    costs = costs_from(program, machine, found.keys, timings, found.folded)
    sources = [timings[k].source for k in found.steps if k in timings]
    measured = sources.count(Source.MEASURED)
    scaled = sources.count(Source.SCALED)
    return StepProfile(
        costs=costs,
        distinct=len(found.steps),
        measured=measured,
        scaled=scaled,
        calibrated=len(found.steps) - measured - scaled,
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
    """The timing of one step, on a part of its batch where the whole does not fit."""
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
