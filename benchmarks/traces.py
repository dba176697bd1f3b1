"""traces: the microseconds of each kernel of a compiled step, by the instruction that launches it,
and how long the device is busy."""

from __future__ import annotations

import json
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

_STEPS = 2
"""Steps under the profiler."""

_WARM_SECONDS = 1.5
"""Of steps before them: an H200 at its limit of power has lowered its clock by then
(`sustained.py`), as it has in the steps that are timed."""


def traced(path: pathlib.Path, step: Any, run: Callable[[Any], Any], state: Any) -> Any:
    """Writes PATH.hlo (the instructions of `step`), PATH.kernels.json and PATH.busy.json.

    Args:
      path: without an ending.
      step: what has `as_text`, the compiled step.
      run: state -> (state, loss).

    Returns:
      The state after the steps.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".hlo").write_text(step.as_text())
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    begun = time.perf_counter()
    while time.perf_counter() - begun < _WARM_SECONDS:
        state, loss = run(state)
        jax.block_until_ready(loss)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for _ in range(_STEPS):
                state, loss = run(state)
            jax.block_until_ready((state, loss))
        [file] = sorted(pathlib.Path(directory).rglob("*.xplane.pb"))
        profile = jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes())
    rows = json.dumps(kernels(profile), indent=0)
    path.with_name(path.name + ".kernels.json").write_text(rows)
    path.with_name(path.name + ".busy.json").write_text(json.dumps(busy(profile)))
    return state


def busy(profile: Any) -> dict[str, float]:
    """Microseconds of a step: from the first kernel's start to the last one's end ("span"), in which
    at least one kernel runs ("busy"), and of all kernels together ("sum"), which is more where they
    overlap: one may be launched before the one before it ends, and wait."""
    intervals = sorted(
        (event.start_ns, event.start_ns + event.duration_ns) for _, event in _events(profile)
    )
    total, covered, end = 0.0, 0.0, -float("inf")
    for first, last in intervals:
        total += last - first
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    span = end - intervals[0][0] if intervals else 0.0
    nanos = {"span": span, "busy": covered, "sum": total}
    return {name: n / 1e3 / _STEPS for name, n in nanos.items()}


def _events(profile: Any) -> Iterator[tuple[str, Any]]:
    """What runs on GPUs, with the instruction that launches it."""
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    yield str(dict(event.stats).get("hlo_op", "")), event


def kernels(profile: Any) -> list[dict[str, Any]]:
    """Of each instruction and kernel: how often it ran in a step, and its microseconds in a step."""
    counts: Counter[tuple[str, str]] = Counter()
    micros: Counter[tuple[str, str]] = Counter()
    for op, event in _events(profile):
        counts[op, event.name] += 1
        micros[op, event.name] += event.duration_ns / 1e3
    return [
        {"op": op, "kernel": name, "times": counts[op, name] / _STEPS, "us": us / _STEPS}
        for (op, name), us in micros.most_common()
    ]
