"""trace: spans in lanes, for Perfetto and chrome://tracing (the Trace Event Format, as JSON)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vmem_jax.core.costs import Costs, Source
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline
from vmem_jax.core.stays import live_by_kind
from vmem_jax.policy.base import what_holds, where_peak
from vmem_jax.report.whole import write_whole

COMPUTE, OUT, INTO = "compute", "device to host", "host to device"
LANES = (COMPUTE, OUT, INTO)
LANE_OF = {"out": OUT, "into": INTO}


@dataclasses.dataclass(frozen=True)
class Span:
    """What a lane does from `begin` to `end`, in seconds since the start of the step.

    Attributes:
      lane: one of `LANES`.
      name: what a viewer shows.
      category: "step", "copy", "stall" or "kernel".
      args: what a viewer shows when the span is clicked.
    """

    lane: str
    name: str
    category: str
    begin: float
    end: float
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Track:
    """A number over time: `(seconds, {series: value})` where it changes."""

    name: str
    values: Sequence[tuple[float, Mapping[str, int]]]


@dataclasses.dataclass(frozen=True)
class Instant:
    """A moment worth finding."""

    name: str
    at: float
    args: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Recording:
    """One run of a step, predicted or real: its lanes, and what is drawn beside them."""

    name: str
    spans: Sequence[Span]
    tracks: Sequence[Track] = ()
    instants: Sequence[Instant] = ()


def predicted(
    program: Program, timeline: Timeline, costs: Costs, budget: int | None = None
) -> Recording:
    """The lanes of `timeline`: every step, copy and stall, the live bytes, the budget, the peak."""
    tracks = [Track("live bytes", _live(program, timeline))]
    instants = []
    if budget is not None:
        line = {"budget": budget}
        tracks.append(Track("budget", [(0.0, line), (timeline.seconds, line)]))
    if timeline.peak_at >= 0:
        holders = what_holds(program, timeline)
        about = {
            "nbytes": timeline.peak,
            "at": where_peak(program, timeline),
            "holders": holders,
            "budget": budget,
        }
        instants.append(Instant("peak", timeline.start[timeline.peak_at], about))
    spans = [*_steps(program, timeline, costs), *_copies(program, timeline)]
    return Recording("predicted", [*spans, *_stalls(program, timeline)], tracks, instants)


def chrome_trace(*recordings: Recording) -> dict[str, Any]:
    """The Trace Event Format of `recordings`, side by side: a process each, a thread a lane.

    Duration and instant events have times in microseconds, counters have bytes.
    """
    events: list[dict[str, Any]] = []
    for pid, recording in enumerate(recordings, 1):
        own = {"pid": pid}
        events += _names(pid, recording.name)
        for span in recording.spans:
            tid = 1 + LANES.index(span.lane)
            what = {"tid": tid, "name": span.name, "cat": span.category, "args": dict(span.args)}
            begin, end = _nanoseconds(span.begin), _nanoseconds(span.end)
            when = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
            events.append({"ph": "X", **own, **what, **when})
        for track in recording.tracks:
            series = dict.fromkeys(name for _, values in track.values for name in values)
            for at, values in track.values:
                full = {name: values.get(name, 0) for name in series}  # or an old value would stay
                counter = {"ph": "C", **own, "name": track.name, "ts": _nanoseconds(at) / 1e3}
                events.append({**counter, "args": full})
        for instant in recording.instants:
            what = {"tid": 1, "name": instant.name, "ts": _nanoseconds(instant.at) / 1e3}
            events.append({"ph": "i", "s": "p", **own, **what, "args": dict(instant.args)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _nanoseconds(seconds: float) -> int:
    """A whole number, so that a span ends no later than the next one begins.

    Perfetto reads nanoseconds and drops spans of a lane that overlap by one.
    """
    return round(seconds * 1e9)


def _names(pid: int, name: str) -> list[dict[str, Any]]:
    """The metadata that names a process and its threads, and keeps them in order."""
    found = [
        (0, "process_name", {"name": name}),
        (0, "process_sort_index", {"sort_index": pid}),
    ]
    for tid, lane in enumerate(LANES, 1):
        found += [
            (tid, "thread_name", {"name": lane}),
            (tid, "thread_sort_index", {"sort_index": tid}),
        ]
    return [{"ph": "M", "pid": pid, "tid": t, "name": n, "args": args} for t, n, args in found]


def save(trace: Mapping[str, Any], path: str | Path) -> None:
    """Writes `trace` as JSON, whole or not at all."""
    write_whole(path, json.dumps(trace, allow_nan=False) + "\n")


def _steps(program: Program, timeline: Timeline, costs: Costs) -> list[Span]:
    spans, ran = [], set()
    for position, (s, begin) in enumerate(zip(timeline.order, timeline.start, strict=True)):
        step = program.steps[s]
        source = costs.sources[s] if costs.sources else Source.ROOFLINE
        about: dict[str, Any] = {
            "layer": step.layer,
            "op": step.op,
            "phase": step.phase.value,
            "line": step.source,
            "seconds from": source.value,
            "recomputed": s in ran,
            "step": s,
            "position": position,
            "live nbytes": timeline.live_nbytes[position],
        }
        if step.body:
            about["iterations"] = step.length
            about["seconds an iteration"] = costs.seconds[s] / step.iterations
        again = " again" if s in ran else ""
        name = f"{step.layer or '(no layer)'}: {step.op}{again}"
        spans.append(Span(COMPUTE, name, "step", begin, begin + costs.seconds[s], about))
        ran.add(s)
    return spans


def _copies(program: Program, timeline: Timeline) -> list[Span]:
    return [
        Span(
            LANE_OF[direction],
            program.buffers[t.buffer].label,
            "copy",
            copy.begin,
            copy.end,
            copy_args(program, timeline, i),
        )
        for i, (t, pair) in enumerate(zip(timeline.transfers, timeline.copies, strict=True))
        for direction, copy in zip(("out", "into"), pair, strict=True)
    ]


def _stalls(program: Program, timeline: Timeline) -> list[Span]:
    return [
        Span(
            COMPUTE,
            f"waits for {program.buffers[timeline.transfers[wait.transfer].buffer].label}",
            "stall",
            wait.begin,
            wait.end,
            {
                **copy_args(program, timeline, wait.transfer),
                "for the copy": LANE_OF[wait.direction],
            },
        )
        for wait in timeline.waits
    ]


def copy_args(program: Program, timeline: Timeline, i: int) -> dict[str, Any]:
    """What a viewer shows of transfer `i`."""
    transfer = timeline.transfers[i]
    buffer = program.buffers[transfer.buffer]
    return {
        "transfer": i,
        "buffer": buffer.label,
        "kind": buffer.kind.value,
        "nbytes": buffer.nbytes,
        "start, gone, fetch, back": [transfer.start, transfer.gone, transfer.fetch, transfer.back],
    }


def _live(program: Program, timeline: Timeline) -> list[tuple[float, dict[str, int]]]:
    """What is live from each start on; of steps that start together (some take no time) the most.

    A viewer shows one value a moment, and the peak must not be lost.
    """
    found: list[tuple[float, dict[str, int]]] = []
    for at, values in zip(timeline.start, live_by_kind(program, timeline), strict=True):
        if not found or found[-1][0] != at:
            found.append((at, values))
        elif sum(values.values()) >= sum(found[-1][1].values()):
            found[-1] = (at, values)
    return found
