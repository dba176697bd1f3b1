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


def rows(tmp_path, *options):
    """The row of each run with these options."""
    out = tmp_path / "rows.jsonl"
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    for given in options:
        command = [sys.executable, str(SCRIPT), *small, *given, f"--out={out}"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, check=True, capture_output=True)
    return [*map(json.loads, out.read_text().splitlines())]


def test_both_ways_train_alike_with_moments_in_host_memory(tmp_path):
    plan = tmp_path / "plan.json"
    given = ["--way=checkpoint"], [f"--save_plan={plan}"], [f"--plan={plan}"]
    kept, *streamed = rows(tmp_path, *given)
    layers = 2 * 2 * 4 * (4 * 64 * 64 + 3 * 64 * 128) / 2**30  # two moments of two layers
    assert kept["pinned_gib"] == kept["moved_gib"] == 0
    for row in streamed:
        assert row["pinned_gib"] == row["moved_gib"] == layers and len(row["losses"]) == 3
        np.testing.assert_allclose(row["losses"], kept["losses"], rtol=2e-4)
    assert streamed[0]["losses"] == streamed[1]["losses"]


def test_scanned_layers_train_alike_with_all_their_state_in_host_memory(tmp_path):
    scanned = ["--scanned", "--layers=4"]
    given = [*scanned, "--way=checkpoint"], [*scanned, "--hosted=state"]
    kept, streamed = rows(tmp_path, *given)
    layers = 3 * 4 * 4 * (4 * 64 * 64 + 3 * 64 * 128) / 2**30  # weights and moments of four layers
    assert streamed["moved_gib"] >= layers
    assert streamed["pinned_gib"] == streamed["moved_gib"]
    np.testing.assert_allclose(streamed["losses"], kept["losses"], rtol=2e-4)
