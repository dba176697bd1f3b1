"""compare: predicted and real transfers and stalls, as a table, in words and as lanes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from vmem_jax.core.costs import Costs
from vmem_jax.core.lanes import Copy
from vmem_jax.core.observation import Observation
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline
from vmem_jax.report.trace import (
    COMPUTE,
    LANE_OF,
    Recording,
    Span,
    chrome_trace,
    copy_args,
    predicted,
)

Times = list[tuple[float, float]]
"""Stretches of time, in order and apart."""


@dataclasses.dataclass(frozen=True)
class CopyRow:
    """One copy, predicted and real, in seconds; the real ones are medians over the runs.

    Attributes:
      transfer: the index in the plan's transfers.
      direction: "out" to the host, "into" the device.
      predicted, real: the time of the copy.
      predicted_stall: seconds that the compute lane was predicted to wait for it.
      real_stall: seconds that it waited.
    """

    transfer: int
    direction: str
    label: str
    nbytes: int
    predicted: Copy
    real: Copy
    predicted_stall: float
    real_stall: float


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The seconds in which lanes are busy.

    Attributes:
      out, into: seconds of copies to the host, and to the device.
      both: seconds in which both lanes copy.
      copies: seconds in which at least one lane copies.
      hidden: seconds of copies during compute.
    """

    out: float
    into: float
    both: float
    copies: float
    hidden: float

    def __str__(self) -> str:
        share = lambda part, whole: f"{part / whole:.0%}" if whole else "none"
        return (
            f"both directions at once {_ms(self.both)} ms "
            f"({share(self.both, min(self.out, self.into))} of the shorter), copies under compute "
            f"{_ms(self.hidden)} of {_ms(self.copies)} ms ({share(self.hidden, self.copies)})"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A plan's transfers, predicted and real.

    Attributes:
      rows: every copy, by its predicted begin.
      predicted_seconds, real_seconds: the seconds of the step; the real ones are a median over the
        runs.
      lanes: recordings of the prediction and of the run with the median length.
      notes: what was not seen, and how the clocks were aligned.
    """

    rows: tuple[CopyRow, ...]
    predicted_seconds: float
    real_seconds: float
    predicted_overlap: Overlap
    real_overlap: Overlap
    lanes: tuple[Recording, Recording]
    notes: tuple[str, ...]

    def table(self) -> Table:
        table = Table(
            "copy", "tensor", "MiB", "start ms", "real", "ms", "real", "GB/s", "real", "stall ms",
            "real", title="transfers, predicted and real",
        )  # fmt: skip
        for column in table.columns[2:]:
            column.justify = "right"
        for row in self.rows:
            table.add_row(
                f"{row.transfer} {row.direction}",
                row.label,
                f"{row.nbytes / 2**20:.1f}",
                *(_ms(copy.begin) for copy in (row.predicted, row.real)),
                *(_ms(copy.end - copy.begin) for copy in (row.predicted, row.real)),
                *(_rate(row.nbytes, copy) for copy in (row.predicted, row.real)),
                *map(_ms, (row.predicted_stall, row.real_stall)),
            )
        return table

    def summary(self) -> str:
        stalls = [sum(r.predicted_stall for r in self.rows), sum(r.real_stall for r in self.rows)]
        lines = [
            f"step: predicted {_ms(self.predicted_seconds)} ms, real {_ms(self.real_seconds)} ms "
            f"({self.real_seconds / self.predicted_seconds - 1:+.1%})",
            f"stalls: predicted {_ms(stalls[0])} ms, real {_ms(stalls[1])} ms",
            f"predicted overlap: {self.predicted_overlap}",
            f"real overlap: {self.real_overlap}",
            *self.notes,
        ]
        if not self.rows:
            lines[1:4] = ["the plan moves nothing, so there are no transfers to compare"]
        return "\n".join(lines)

    def trace(self) -> dict[str, Any]:
        """Both side by side as a Chrome trace."""
        return chrome_trace(*self.lanes)


def compare(
    program: Program,
    timeline: Timeline,
    costs: Costs,
    runs: Sequence[Observation],
    *,
    budget: int | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compares `runs` of a plan with its `timeline`.

    Raises:
      ValueError: a run lacks a copy of the plan, so it ran something else.
    """
    for run in runs:
        lacking = [
            f"{i} {direction}"
            for i in range(len(timeline.transfers))
            for direction in ("out", "into")
            if (i, direction) not in run.copies or (i, direction) not in run.waits
        ]
        if lacking:
            raise ValueError(
                f"{len(lacking)} of the plan's {2 * len(timeline.transfers)} copies were not seen in "
                f"a run of {_ms(run.seconds)} ms: {', '.join(lacking[:5])}. Was the tensor cache on?"
            )
    typical = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    rows = []
    for i, (t, pair) in enumerate(zip(timeline.transfers, timeline.copies, strict=True)):
        buffer = program.buffers[t.buffer]
        for direction, copy in zip(("out", "into"), pair, strict=True):
            waits = [w for w in timeline.waits if (w.transfer, w.direction) == (i, direction)]
            rows.append(
                CopyRow(
                    transfer=i,
                    direction=direction,
                    label=buffer.label,
                    nbytes=buffer.nbytes,
                    predicted=copy,
                    real=_median([run.copies[i, direction] for run in runs]),
                    predicted_stall=sum(w.end - w.begin for w in waits),
                    real_stall=_seconds(_median([run.waits[i, direction] for run in runs])),
                )
            )
    overlaps = [_real_overlap(run) for run in runs]
    return Comparison(
        rows=tuple(sorted(rows, key=lambda row: row.predicted.begin)),
        predicted_seconds=timeline.seconds,
        real_seconds=statistics.median(run.seconds for run in runs),
        predicted_overlap=_predicted_overlap(timeline, costs),
        real_overlap=overlaps[[run is typical for run in runs].index(True)],
        lanes=(predicted(program, timeline, costs, budget), _real(program, timeline, typical)),
        notes=tuple(notes),
    )


def _predicted_overlap(timeline: Timeline, costs: Costs) -> Overlap:
    steps = zip(timeline.order, timeline.start, strict=True)
    return _overlap(
        [(pair[0].begin, pair[0].end) for pair in timeline.copies],
        [(pair[1].begin, pair[1].end) for pair in timeline.copies],
        _union((begin, begin + costs.seconds[s]) for s, begin in steps),
    )


def _real_overlap(run: Observation) -> Overlap:
    """Where no kernel was seen, the compute lane computes whenever it does not wait.

    Where kernels were, waits are not taken off: on the CPU one thread may wait while others compute.
    """
    busy = _union((k.begin, k.end) for k in run.kernels)
    if not busy:
        waits = _union((w.begin, w.end) for w in run.waits.values())
        busy = _without([(0.0, run.seconds)], waits)
    of = lambda direction: [(c.begin, c.end) for (_, w), c in run.copies.items() if w == direction]
    return _overlap(of("out"), of("into"), busy)


def _overlap(out: Times, into: Times, compute: Times) -> Overlap:
    out, into, copies = _union(out), _union(into), _union([*out, *into])
    return Overlap(
        out=_length(out),
        into=_length(into),
        both=_length(_both(out, into)),
        copies=_length(copies),
        hidden=_length(_both(copies, compute)),
    )


def _real(program: Program, timeline: Timeline, run: Observation) -> Recording:
    """The lanes of `run`. A wait of the compute lane replaces what it cuts short."""
    spans = [Span(COMPUTE, k.name, "kernel", k.begin, k.end) for k in run.kernels]
    for (i, direction), copy in run.copies.items():
        args = copy_args(program, timeline, i)
        args["GB/s"] = args["nbytes"] / 1e9 / max(_seconds(copy), 1e-9)
        spans.append(Span(LANE_OF[direction], args["buffer"], "copy", copy.begin, copy.end, args))
    for (i, direction), wait in run.waits.items():
        args = {**copy_args(program, timeline, i), "for the copy": LANE_OF[direction]}
        name = f"waits for {args['buffer']}"
        spans.append(Span(COMPUTE, name, "stall", wait.begin, wait.end, args))
    return Recording("real", spans)


# -- stretches of time


def _union(times: Iterable[tuple[float, float]]) -> Times:
    found: Times = []
    for begin, end in sorted(times):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _both(a: Times, b: Times) -> Times:
    """Where both are; each in order and apart."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _without(a: Times, b: Times) -> Times:
    """`a` where `b` is not; each in order and apart."""
    found = []
    for begin, end in a:
        for hole, until in _both([(begin, end)], b):
            if hole > begin:
                found.append((begin, hole))
            begin = until
        if end > begin:
            found.append((begin, end))
    return found


def _length(times: Times) -> float:
    return sum(end - begin for begin, end in times)


# -- numbers


def _median(copies: Sequence[Copy]) -> Copy:
    """Of the begins, and of the lengths."""
    begin = statistics.median(c.begin for c in copies)
    return Copy(begin, begin + statistics.median(map(_seconds, copies)))


def _seconds(copy: Copy) -> float:
    return copy.end - copy.begin


def _rate(nbytes: int, copy: Copy) -> str:
    seconds = _seconds(copy)
    return f"{nbytes / seconds / 1e9:.1f}" if seconds else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
