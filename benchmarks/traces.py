"""traces: the microseconds of each kernel of a compiled step, by the instruction that launches it."""

from __future__ import annotations

import json
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

_STEPS = 2
"""Steps under the profiler."""

_WARM_SECONDS = 1.5
"""Of steps before them: an H200 at its limit of power has lowered its clock by then
(`sustained.py`), as it has in the steps that are timed."""


def traced(path: pathlib.Path, step: Any, run: Callable[[Any], Any], state: Any) -> Any:
    """Writes PATH.hlo (the instructions of the compiled `step`) and PATH.kernels.json.

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
    return state


def kernels(profile: Any) -> list[dict[str, Any]]:
    """Of each instruction and kernel: how often it ran in a step, and its microseconds in a step."""
    counts: Counter[tuple[str, str]] = Counter()
    micros: Counter[tuple[str, str]] = Counter()
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                key = str(stats.get("hlo_op", "")), event.name
                counts[key] += 1
                micros[key] += event.duration_ns / 1e3
    return [
        {"op": op, "kernel": name, "times": counts[op, name] / _STEPS, "us": us / _STEPS}
        for (op, name), us in micros.most_common()
    ]
