"""xspace: xprof is shown what the simulator said; JAX's own reader and xprof's open the file."""

from __future__ import annotations

import gzip
import json

import jax
import pytest
from test_memory_page import OWN
from test_trace import ARGUMENTS, CHAIN, SLOW, slow, train_step

import vmem_jax
from vmem_jax import cli
from vmem_jax.report.trace import COMPUTE, LANES, Instant, Recording, Span, Track, predicted
from vmem_jax.report.xspace import COUNTERS, MARKS, PLANE, save_trace, xspace

RECORDING = predicted(CHAIN, slow(), SLOW, budget=77)


def read(serialized: bytes) -> dict:
    """The events of each plane and line, as JAX reads them: XLA's schema, none of this package."""
    planes = jax.profiler.ProfileData.from_serialized_xspace(serialized).planes
    return {plane.name: {line.name: list(line.events) for line in plane.lines} for plane in planes}


def test_the_lines_are_the_lanes():
    lines = read(xspace(RECORDING))[PLANE + "predicted"]
    assert [*lines] == [*LANES, MARKS, COUNTERS] or [*lines] == [*LANES, COUNTERS, MARKS]
    for lane in LANES:
        spans = [span for span in RECORDING.spans if span.lane == lane]
        assert [event.name for event in lines[lane]] == [span.name for span in spans]
        for event, span in zip(lines[lane], spans, strict=True):
            assert event.start_ns == pytest.approx(span.begin * 1e9)
            assert event.duration_ns == pytest.approx(span.seconds * 1e9)
            told = {
                k: json.dumps(v) if isinstance(v, bool | list) else v for k, v in span.args.items()
            }
            assert dict(event.stats) == told
    (peak,) = lines[MARKS]
    assert peak.name == "peak" and dict(peak.stats)["nbytes"] == slow().peak


def test_the_counters_add_up_to_the_live_bytes():
    at: dict[float, int] = {}
    for event in read(xspace(RECORDING))[PLANE + "predicted"][COUNTERS]:
        ((_, value),) = event.stats
        if event.name == "budget":
            assert value == 77
        else:
            assert event.name.startswith("live bytes: ")
            at[event.start_ns] = at.get(event.start_ns, 0) + value
    assert [*at.values()] == list(slow().live_nbytes)


def test_numbers_and_names_of_any_kind():
    args = {"large": 2**40, "below": -3, "half": 0.5, "none": None, "text": 'a "µ"\n', "is": True}
    span = Span(COMPUTE, "ü" * 200, "step", 3600.0, 3600.0 + 1e-9, args)
    track = Track("n", [(0.0, {"n": 1}), (1.0, {})])  # without a value it is 0
    lines = read(
        xspace(Recording("a", [span], [track], [Instant("i", 1.0, {})]), Recording("b", []))
    )
    assert [*lines] == [PLANE + "a", PLANE + "b"]
    (event,) = lines[PLANE + "a"][COMPUTE]
    assert event.name == span.name and event.start_ns == 3600e9 and event.duration_ns == 1
    assert dict(event.stats) == {**args, "none": "null", "is": "true"}
    assert [dict(e.stats)["value"] for e in lines[PLANE + "a"][COUNTERS]] == [1, 0]


def test_a_name_without_a_suffix_is_a_log_directory(tmp_path):
    step = vmem_jax.jit(train_step, budget=0.7, donate_argnums=0)
    explanation = step.explain(*ARGUMENTS)
    for _ in range(2):  # the second beside the first
        explanation.save_trace(tmp_path / "log")
    files = [*(tmp_path / "log").glob("plugins/profile/*/vmem_jax.xplane.pb")]
    assert len(files) == 2 and len([*(tmp_path / "log").rglob("*.*")]) == 2
    events = read(files[0].read_bytes())[PLANE + "predicted"][COMPUTE]
    assert {event.name.partition(":")[0] for event in events} >= {f"layer{i}" for i in range(6)}
    explanation.save_trace(tmp_path / "trace.json")
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    (tmp_path / "run.1").mkdir()
    assert save_trace(tmp_path / "run.1", RECORDING).parent.parent.name == "profile"


def test_the_command_line_writes_it(tmp_path, capsys):
    (tmp_path / "own_traced_step.py").write_text(OWN)
    own = str(tmp_path / "own_traced_step.py")
    asked = ["plan", f"{own}:step", "--args", f"{own}:shapes", "--budget", "0.9"]
    assert cli.main([*asked, "--trace", str(tmp_path / "log")]) == 0
    assert [*(tmp_path / "log").rglob("*.xplane.pb")] and "log" in capsys.readouterr().out


@pytest.mark.parametrize("tool", ["trace_viewer", "trace_viewer@"])
def test_xprof_opens_it(tmp_path, tool):
    """With the code that its server runs; `pip install xprof` brings it, which CI does not."""
    conversion = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="xprof is not here")
    step = vmem_jax.jit(train_step, budget=0.7, donate_argnums=0)
    explanation = step.explain(*ARGUMENTS)
    explanation.save_trace(tmp_path)
    paths = [str(path) for path in tmp_path.glob("plugins/profile/*/*.xplane.pb")]
    assert {"trace_viewer", "trace_viewer@"} & {*conversion.xspace_to_tool_names(paths)}
    shown, _ = conversion.xspace_to_tool_data(paths, tool, {})
    if isinstance(shown, bytes) and shown.startswith(b"\x1f\x8b"):
        shown = gzip.decompress(shown)
    events = json.loads(shown)["traceEvents"]
    of = lambda phase, name: [e for e in events if e.get("ph") == phase and e["name"] == name]
    processes = [e["args"]["name"] for e in of("M", "process_name")]
    assert any(PLANE + "predicted" in name for name in processes)
    assert {e["args"]["name"] for e in of("M", "thread_name")} >= {COMPUTE}
    spans = [e for e in events if e.get("ph") == "X" and e["name"].startswith("layer")]
    named = [s for s in explanation_spans(explanation) if s.name.startswith("layer")]
    assert {e["name"] for e in spans} == {span.name for span in named}
    longest = max(named, key=lambda span: span.seconds)
    assert max(e["dur"] for e in spans) == pytest.approx(longest.seconds * 1e6, rel=1e-3)
    if tool == "trace_viewer@":  # the older viewer draws no counters
        assert any(e.get("ph") == "C" and e["name"].startswith("live bytes") for e in events)


def explanation_spans(explanation) -> list[Span]:
    return [*predicted(explanation.program, explanation.timeline, explanation.costs).spans]
