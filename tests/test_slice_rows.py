"""The loop whose slices are timed, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import slices
import step_rows


def test_the_loop_trains_all_of_its_layers():
    step, (weights, xs) = slices.loop(depth=2, iterations=3, rows=4)
    moved = np.abs(jax.jit(step)(weights, xs) - weights)
    assert xs.shape == (3, slices.WIDTH) and (moved.max(axis=(1, 2)) > 0).all()


def test_the_table_has_microseconds_of_an_iteration_of_either_loop(tmp_path):
    row = {"slice_nbytes": 2**20, "stacks": 4, "iterations": 100, "ms": 10.0, "exact_ms": 2.0}
    (tmp_path / "slices_h200.jsonl").write_text(json.dumps(row) + "\n")
    assert "| 1024 KiB | 4 | 10.0 | 50.0 |" in step_rows.slices_tables(tmp_path)
