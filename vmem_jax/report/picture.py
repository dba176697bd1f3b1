"""picture: what a page about the memory of a plan shows, as JSON values, in bytes and seconds."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.costs import Costs
from vmem_jax.core.pareto_point import ParetoPoint
from vmem_jax.core.program import COMPRESS, Phase, Program
from vmem_jax.core.schedule import actions
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.core.stays import live_by, live_during, stays
from vmem_jax.errors import show_nbytes
from vmem_jax.policy.base import where_peak
from vmem_jax.report.explain import Explanation
from vmem_jax.report.grouping import groups_of
from vmem_jax.report.trace import COMPUTE, INTO, OUT, Span, predicted

COLUMNS = 800
"""Points of a curve: a screen has about as many pixels. Of what falls together the highest stays."""

SPANS = 1500
"""Parts of the compute lane: shorter neighbours of one kind stand together."""

VALUES = 150
"""Rows of the table."""

RESIDENT = "arguments and results"


def picture(
    whole: Program,
    whole_costs: Costs,
    explanation: Explanation,
    points: Sequence[ParetoPoint] = (),
    name: str = "step",
    device: str = "",
) -> dict[str, Any]:
    """What a page shows of a plan, beside plain jit.

    Args:
      whole: the step as it was traced, which plain jit runs.
      whole_costs: of that.
      points: of the trade of seconds against bytes.
      device: the card's name, for people.
    """
    plan, timeline = explanation.plan, explanation.timeline
    program = explanation.program
    plain = simulate(whole, range(len(whole.steps)), whole_costs)
    sizes: dict[str, int] = {}
    for each in (whole, program):
        for step in each.steps:
            written = sum(each.buffers[b].nbytes for b in step.writes)
            sizes[step.layer] = sizes.get(step.layer, 0) + written
    groups = groups_of(sizes)
    return {
        "name": name,
        "layers": list(dict.fromkeys(groups.values())),
        "device": device,
        "budget": explanation.budget,
        "policy": plan.policy,
        "sub_batches": plan.sub_batches,
        "costs": "measured" if explanation.costs.sources else "roofline",
        "error": explanation.costs.error,
        "panels": [
            _panel(whole, plain, groups, "plain jax.jit", explanation.plain_need),
            _panel(program, timeline, groups, "the plan", explanation.compiled_need),
        ],
        "spans": _spans(program, timeline, explanation.costs),
        "values": _values(explanation),
        "points": [
            {
                "budget": point.budget,
                "seconds": point.predicted_seconds,
                "compiled": point.compiled_peak,
                "techniques": list(point.techniques),
            }
            for point in points
        ],
    }


# -- bytes over time


def _panel(
    program: Program, timeline: Timeline, groups: dict[str, str], title: str, compiled: int
) -> dict[str, Any]:
    buffers, producer = program.buffers, program.producer

    def layer(b: int) -> str:
        if program.is_resident[b]:
            return RESIDENT
        return groups[program.steps[producer[b]].layer] if producer[b] >= 0 else RESIDENT

    columns = _columns(timeline)
    return {
        "title": title,
        "seconds": timeline.seconds,
        "compiled": compiled,
        "at": [timeline.start[p] for p in columns],
        "kinds": _series(program, timeline, columns, lambda b: buffers[b].kind.value),
        "layers": _series(program, timeline, columns, layer),
        "peak": {
            "at": timeline.start[timeline.peak_at] if timeline.peak_at >= 0 else 0.0,
            "nbytes": timeline.peak,
            "where": where_peak(program, timeline),
            "holders": _holders(program, timeline),
        },
    }


def _columns(timeline: Timeline) -> list[int]:
    """The positions that are drawn: of each stretch of time the one with the most bytes."""
    end = timeline.seconds or 1.0
    highest: dict[int, int] = {}
    for position, at in enumerate(timeline.start):
        column = int(at / end * (COLUMNS - 1))
        best = highest.get(column)
        if best is None or timeline.live_nbytes[position] > timeline.live_nbytes[best]:
            highest[column] = position
    return sorted(highest.values())


def _series(
    program: Program, timeline: Timeline, columns: Sequence[int], of: Callable[[int], str]
) -> dict[str, list[int]]:
    """Bytes by `of` at `columns`, the name of the largest total first."""
    history = live_by(program, timeline, of)
    names = dict.fromkeys(name for p in columns for name, n in history[p].items() if n)
    found = {name: [max(history[p].get(name, 0), 0) for p in columns] for name in names}
    return dict(sorted(found.items(), key=lambda item: -sum(item[1])))


def _holders(program: Program, timeline: Timeline) -> list[dict[str, Any]]:
    """The largest values at the peak, the arguments and results as one."""
    if timeline.peak_at < 0:
        return []
    live = live_during(program, timeline, timeline.peak_at)
    step = program.steps[timeline.order[timeline.peak_at]]
    found = [(RESIDENT, "", program.resident_nbytes), ("workspace", step.layer, step.workspace)]
    for b in live:
        made = program.producer[b]
        layer = program.steps[made].layer if made >= 0 else ""
        found.append((program.buffers[b].label, layer, program.buffers[b].nbytes))
    found = sorted((each for each in found if each[2]), key=lambda each: -each[2])
    shown = [{"label": n, "layer": layer, "nbytes": size} for n, layer, size in found[:8]]
    if rest := found[8:]:
        total = sum(size for _, _, size in rest)
        shown.append({"label": f"{len(rest)} smaller values", "layer": "", "nbytes": total})
    return shown


# -- lanes


def _spans(program: Program, timeline: Timeline, costs: Costs) -> list[dict[str, Any]]:
    """What the lanes do, by category; short neighbours of one category stand together."""
    shortest = timeline.seconds / SPANS
    found: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}
    spans = predicted(program, timeline, costs).spans
    for span in sorted(spans, key=lambda span: (span.lane, span.begin)):
        if span.seconds <= 0:
            continue
        category = _category(span)
        before = last.get(span.lane)
        if (
            before is not None
            and before["category"] == category
            and (span.seconds < shortest or before["end"] - before["begin"] < shortest)
            and span.begin - before["end"] < shortest
        ):
            before["end"], before["count"] = span.end, before["count"] + 1
            continue
        about = {
            "category": category,
            "lane": {COMPUTE: "compute", OUT: "out", INTO: "in"}[span.lane],
            "begin": span.begin,
            "end": span.end,
            "name": span.name,
            "line": span.args.get("line", ""),
            "nbytes": span.args.get("nbytes", 0),
            "count": 1,
        }
        found.append(about)
        last[span.lane] = about
    return found


def _category(span: Span) -> str:
    if span.category == "stall":
        return "waits"
    if span.lane != COMPUTE:
        return "copy out" if span.lane == OUT else "copy in"
    return "recompute" if span.args["recomputed"] else str(span.args["phase"])


# -- values


def _values(explanation: Explanation) -> list[dict[str, Any]]:
    """The largest values of the plan: where they are made, when they live, what is decided, why."""
    program, timeline = explanation.program, explanation.timeline
    costs, buffers = explanation.costs, program.buffers
    ends = [*timeline.start[1:], timeline.seconds]
    runs: dict[int, int] = {}
    for s in timeline.order:
        runs[s] = runs.get(s, 0) + 1
    there: dict[int, list[tuple[float, float]]] = {}  # seconds on the device
    for stay in stays(program, actions(program, timeline.order, timeline.transfers)):
        span = timeline.start[stay.first], ends[stay.last]
        there.setdefault(stay.buffer, []).append(span)
    away: dict[int, list[int]] = {}
    for i, t in enumerate(timeline.transfers):
        away.setdefault(t.buffer, []).append(i)
    convolutions = dict(explanation.plan.convolutions)
    ids = sorted(range(len(buffers)), key=lambda b: -buffers[b].nbytes)[:VALUES]
    rows = []
    for b in ids:
        made = program.producer[b]
        step = program.steps[made] if made >= 0 else None
        held = program.is_resident[b] and b not in program.hosted
        spans = [(0.0, timeline.seconds)] if held else there.get(b, [])
        decision, reason = _decision(explanation, b, runs, away.get(b, []), spans)
        also: list[str] = []
        configuration = convolutions.get(made)
        if configuration is not None and not configuration.is_xlas:
            how = _how_made(configuration)
            also = ["micro-batched"] * (len(configuration.micros) > 1)
            also += ["fused"] * bool(configuration.epilogue)
            alone = decision == "short-lived" and also
            decision, reason = (also.pop(0), how) if alone else (decision, f"{reason}; {how}")
        rows.append(
            {
                "label": buffers[b].label,
                "kind": buffers[b].kind.value,
                "nbytes": buffers[b].nbytes,
                "layer": step.layer if step is not None else "",
                "line": step.source if step is not None else "",
                "spans": spans,
                "decision": decision,
                "also": also,
                "reason": reason,
                "seconds": costs.seconds[made] if made >= 0 else 0.0,
            }
        )
    return rows


def _how_made(configuration: Configuration) -> str:
    """How a convolution makes a value, for people."""
    parts, nbytes = len(configuration.micros), show_nbytes(configuration.workspace)
    how = f"its convolution runs in {parts} micro-batches" if parts > 1 else "its convolution"
    with_it = f", {configuration.epilogue} fused" if configuration.epilogue else ""
    return f"{how}{' takes' if parts == 1 else ', with'} {nbytes} of workspace{with_it}"


def _decision(
    explanation: Explanation,
    b: int,
    runs: dict[int, int],
    away: Sequence[int],
    spans: Sequence[tuple[float, float]],
) -> tuple[str, str]:
    """(what is decided about a value, why), for people."""
    program, plan, timeline = explanation.program, explanation.plan, explanation.timeline
    buffer, made = program.buffers[b], program.producer[b]
    if program.is_resident[b] and b not in program.hosted:
        return "held throughout", "an argument or a result, which no plan can free"
    if b in plan.looped:
        return "moved by slices", f"{buffer.slices} slices leave and return within their loops"
    if away:
        leaves = b in program.streamed_out  # for good: it is a result in host memory
        begins = [timeline.seconds if leaves else timeline.copies[i][1].begin for i in away]
        gone = sum(begins) - sum(timeline.copies[i][0].end for i in away)
        waits = sum(timeline.stalls[i] for i in away)
        hides = "its copies hide under compute" if not waits else f"the step waits {_ms(waits)}"
        return "moved", f"in host memory for {_ms(max(gone, 0.0))}; {hides}"
    seconds = explanation.costs.seconds[made] if made >= 0 else 0.0
    price = f"{_ms(seconds / max(buffer.nbytes, 1) * 2**30)} a GiB"
    if made >= 0 and runs.get(made, 0) > 1:
        again = runs[made] - 1
        times = "" if again == 1 else f"{again} times, "
        return "recomputed", f"{times}{_ms(again * seconds)}: {price} to make again"
    if made >= 0 and program.steps[made].op == COMPRESS:
        return "compressed", "waits for the backward pass without its zeros"
    if buffer.slices > 1:
        return "stacked", f"{buffer.slices} slices, one of each iteration of a loop"
    held = sum(end - begin for begin, end in spans)
    phases = {program.steps[r].phase for r in program.readers[b]}
    if made >= 0 and program.steps[made].phase is Phase.FORWARD and phases - {Phase.FORWARD}:
        return "kept", f"for {_ms(held)}, until the backward pass reads it; {price} to make again"
    if made >= 0 and program.steps[made].times > 1:
        return "micro-batched", f"one of {program.steps[made].times} parts of the batch"
    return "short-lived", f"read within {_ms(held)} of being made"


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    digits = bisect.bisect([0.001, 0.01, 0.1], seconds)
    return f"{seconds * 1e3:.{3 - digits}f} ms"
