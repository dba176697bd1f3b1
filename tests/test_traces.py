"""What the traces of benchmarks say of a step."""

import sys
import types
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import traces


def event(name, start, duration, op="fusion"):
    stats = {"hlo_op": op}.items()
    return types.SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats)


def profile(*events):
    lines = [types.SimpleNamespace(name="Stream #1", events=events)]
    host = types.SimpleNamespace(name="/host:CPU", lines=lines)
    return types.SimpleNamespace(
        planes=[types.SimpleNamespace(name="/device:GPU:0", lines=lines), host]
    )


FOUND = profile(  # two steps: b is launched while a runs, and nothing runs for 2 us
    *(event("a", 0, 4000), event("b", 3000, 3000), event("a", 8000, 4000), event("b", 11000, 3000)),
)


def test_kernels_that_overlap_are_busy_once():
    assert traces.busy(FOUND) == pytest.approx({"span": 7.0, "busy": 6.0, "sum": 7.0})


def test_kernels_are_of_one_step():
    rows = {row["kernel"]: (row["times"], row["us"]) for row in traces.kernels(FOUND)}
    assert rows == {"a": (1, 4.0), "b": (1, 3.0)}
