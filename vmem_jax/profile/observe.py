"""observe: runs a budgeted step under JAX's profiler, with its transfers timed by their streams.

The kernels are in the profile (an xplane file, which JAX reads itself). Our copies are timed by the
arena, because the CPU's copy lanes are in no profile, and because no profile says that a stream
waits. Both clocks are tied together by annotations, and on a GPU, where the profiler sees the same
copies, by those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from vmem_jax.core.lanes import Copy
from vmem_jax.core.observation import Kernel, Observation
from vmem_jax.errors import VmemError
from vmem_jax.transfer.arena import Arena, Moved

RUNS = 5
WARM_UP = 3

_MARK = "vmem_jax observed run "
_SIZE = re.compile(r"size:(\d+)")


@dataclasses.dataclass(frozen=True)
class Observed:
    """Observed runs of a step.

    Attributes:
      runs: the runs in order.
      notes: what was not seen, and how the clocks were aligned, for people.
    """

    runs: tuple[Observation, ...]
    notes: tuple[str, ...]


def observe(
    call: Callable[[], Any],
    device: jax.Device,
    arena: Arena | None,
    *,
    runs: int = RUNS,
    warm_up: int = WARM_UP,
) -> Observed:
    """Observes some calls of `call`, a step that runs on `device`.

    Args:
      call: runs the step once and returns its results.
      arena: the arena of its transfers; None for a step that moves nothing.

    Raises:
      VmemError: the step ran, but the arena or the profile shows nothing of it.
    """
    for _ in range(warm_up):
        jax.block_until_ready(call())
    windows: list[tuple[float, float]] = []
    stamps: list[float] = []
    with tempfile.TemporaryDirectory(prefix="vmem_jax_profile_") as directory:
        recording = arena.record(device) if arena else contextlib.nullcontext(list[Moved]())
        with recording as moved, jax.profiler.trace(directory, profiler_options=_options()):
            for i in range(runs):
                began = time.monotonic()
                with jax.profiler.TraceAnnotation(f"{_MARK}{i}"):
                    stamps.append((began + time.monotonic()) / 2)
                    jax.block_until_ready(call())
                windows.append((began, time.monotonic()))
        profile = _read(directory)
    if arena is not None and not moved:
        raise VmemError(
            "the step ran, but its arena recorded no copy: this step is not the one of the arena."
        )
    ahead = _ahead(profile, stamps)
    kernels = [dataclasses.replace(k, begin=k.begin - ahead, end=k.end - ahead)
               for k in _kernels(profile, device)]  # fmt: skip
    notes = []
    if not kernels:
        notes.append(
            f"JAX's profiler shows no kernel of {device}, so the compute lane counts as computing "
            f"whenever it does not wait. The profile has: {_contents(profile)}."
        )
    if device.platform != "cpu" and moved:
        kernels, note = _tied(kernels, _memcpys(profile, device, ahead), moved)
        notes.append(note)
    return Observed(tuple(_runs(windows, moved, kernels)), tuple(notes))


def _options() -> Any:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # or every Python call is an event, and slows the host
    return options


def _read(directory: str) -> Any:
    files = sorted(Path(directory).rglob("*.xplane.pb"))
    if not files:
        raise VmemError(f"JAX's profiler wrote no xplane file into {directory}.")
    return jax.profiler.ProfileData.from_serialized_xspace(files[-1].read_bytes())


def _contents(profile: Any) -> str:
    planes = [f"{p.name} ({', '.join(line.name for line in p.lines)})" for p in profile.planes]
    return "; ".join(planes) or "nothing"


def _events(profile: Any, plane: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """(line, event) of every plane whose name passes."""
    for p in profile.planes:
        if plane(p.name):
            for line in p.lines:
                for event in line.events:
                    yield line.name, event


def _ahead(profile: Any, stamps: Sequence[float]) -> float:
    """By how many seconds the profile's clock is ahead of `time.monotonic()`."""
    seen = {
        event.name: event.start_ns / 1e9
        for _, event in _events(profile, lambda plane: plane.startswith("/host"))
        if event.name.startswith(_MARK)
    }
    ahead = [seen[f"{_MARK}{i}"] - at for i, at in enumerate(stamps) if f"{_MARK}{i}" in seen]
    if not ahead:
        raise VmemError(
            "JAX's profiler did not record the annotations around the runs, so its clock is not "
            f"known. It has: {_contents(profile)}."
        )
    return statistics.median(ahead)


def _on(device: jax.Device) -> Callable[[str], bool]:
    return lambda plane: plane == f"/device:GPU:{device.local_hardware_id}"


def _kernels(profile: Any, device: jax.Device) -> list[Kernel]:
    """What `device` computed. On the CPU XLA's operations, our own calls left out: they may wait."""
    found = []
    if device.platform == "cpu":
        for _, event in _events(profile, lambda plane: plane.startswith("/host")):
            op = dict(event.stats).get("hlo_op")
            if op is not None and not str(op).startswith("ffi_call"):
                found.append(_kernel(str(op), event))
    else:
        for line, event in _events(profile, _on(device)):
            if line.startswith("Stream") and not event.name.startswith(("Memcpy", "Memset")):
                found.append(_kernel(event.name, event))
    return sorted(found, key=lambda k: k.begin)


def _kernel(name: str, event: Any) -> Kernel:
    begin = event.start_ns / 1e9
    return Kernel(name, begin, begin + event.duration_ns / 1e9)


def _memcpys(profile: Any, device: jax.Device, ahead: float) -> list[tuple[bool, int, float]]:
    """(to the host, bytes, begin) of every copy over the link, as the profiler saw it."""
    found = []
    for _, event in _events(profile, _on(device)):
        if event.name.startswith(("MemcpyD2H", "MemcpyH2D")):
            size = _SIZE.search(str(dict(event.stats).get("memcpy_details", "")))
            nbytes = int(size.group(1)) if size else -1
            found.append((event.name.startswith("MemcpyD2H"), nbytes, event.start_ns / 1e9 - ahead))
    return sorted(found, key=lambda c: c[2])


def _tied(
    kernels: list[Kernel], memcpys: Sequence[tuple[bool, int, float]], moved: Sequence[Moved]
) -> tuple[list[Kernel], str]:
    """`kernels` on the clock of `moved`, by the copies that are in both; and how well that went."""
    lags: list[float] = []
    for out in (True, False):
        ours = sorted((m for m in moved if not m.waits and m.link and m.out == out),
                      key=lambda m: m.begin)  # fmt: skip
        sizes = {m.nbytes for m in ours}
        theirs = [c for c in memcpys if c[0] == out and c[1] in sizes]
        if [c[1] for c in theirs] != [m.nbytes for m in ours]:
            direction = "to the host" if out else "to the device"
            return kernels, (
                f"JAX's profiler saw {len(theirs)} copies {direction} of the plan's sizes (of "
                f"{sum(c[0] == out for c in memcpys)} in all), the arena made {len(ours)}: the "
                "kernels are laid beside them by the host's clock, to some tens of microseconds."
            )
        lags += [c[2] - m.begin for c, m in zip(theirs, ours, strict=True)]
    lag = statistics.median(lags)
    spread = max(abs(x - lag) for x in lags)
    shifted = [dataclasses.replace(k, begin=k.begin - lag, end=k.end - lag) for k in kernels]
    return shifted, (
        f"JAX's profiler saw the same {len(lags)} copies, with starts within {spread * 1e6:.0f} µs "
        f"of the arena's after a shift by {lag * 1e6:.0f} µs"
    )


def _runs(
    windows: Sequence[tuple[float, float]], moved: Sequence[Moved], kernels: Sequence[Kernel]
) -> Iterator[Observation]:
    """One observation for each window of the host's clock: whatever has its middle in it."""
    for began, ended in windows:
        inside = lambda x, began=began, ended=ended: began <= (x.begin + x.end) / 2 <= ended
        own = [k for k in kernels if inside(k)]
        zero = own[0].begin if own else began
        copies: dict[tuple[int, str], Copy] = {}
        waits: dict[tuple[int, str], Copy] = {}
        for m in filter(inside, moved):
            where = waits if m.waits else copies
            where[m.slot, "out" if m.out else "into"] = Copy(m.begin - zero, m.end - zero)
        shifted = tuple(Kernel(k.name, k.begin - zero, k.end - zero) for k in own)
        yield Observation(ended - zero, copies, waits, shifted)
