"""benchmarks/prediction_errors.py: which measured rows are predicted again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import prediction_errors


def test_the_newest_plain_row_of_each_step_and_card_counts(tmp_path, monkeypatch):
    row = {"way": "plain", "model": "gpt", "batch": 8, "scanned": True, "device": "NVIDIA H200"}
    rows = [
        {**row, "ms": 1.0},
        {**row, "ms": 2.0},  # the newest
        {**row, "error": "RESOURCE_EXHAUSTED"},
        {**row, "ms": 3.0, "mesh": 2},  # on two devices
        {**row, "ms": 4.0, "way": "exact"},
        {**row, "ms": 5.0, "layers": 2},
        {**row, "ms": 6.0, "device": "NVIDIA H100 80GB HBM3"},
    ]
    text = "".join(f"{json.dumps(each)}\n" for each in rows)
    (tmp_path / "training_steps_here.jsonl").write_text(text)
    monkeypatch.setattr(prediction_errors, "RESULTS", tmp_path)
    assert [each["ms"] for each in prediction_errors.newest()] == [2.0, 5.0, 6.0]
