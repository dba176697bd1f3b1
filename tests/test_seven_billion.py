"""benchmarks/seven_billion.py, small and on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "seven_billion.py"
SMALL = {
    "layers": 2,
    "width": 64,
    "hidden": 128,
    "heads": 2,
    "vocabulary": 256,
    "tokens": 32,
    "batch": 2,
    "attention": "xla",
    "steps": 3,
    "warm_up": 1,
    "budget": "1GiB",
}


def test_both_ways_train_alike_with_moments_in_host_memory(tmp_path):
    out, plan = tmp_path / "rows.jsonl", tmp_path / "plan.json"
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    options = [["--way=checkpoint"], [f"--save_plan={plan}"], [f"--plan={plan}"]]
    for given in options:
        command = [sys.executable, str(SCRIPT), *small, *given, f"--out={out}"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, check=True, capture_output=True)
    kept, *streamed = map(json.loads, out.read_text().splitlines())
    layers = 2 * 2 * 4 * (4 * 64 * 64 + 3 * 64 * 128) / 2**30  # two moments of two layers
    assert kept["pinned_gib"] == kept["moved_gib"] == 0
    for row in streamed:
        assert row["pinned_gib"] == row["moved_gib"] == layers and len(row["losses"]) == 3
        np.testing.assert_allclose(row["losses"], kept["losses"], rtol=2e-4)
    assert streamed[0]["losses"] == streamed[1]["losses"]
