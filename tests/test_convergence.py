"""The comparison of loss curves, and the row of a short run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import run_script

pytest.importorskip("sklearn")
ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import convergence  # noqa: E402
import convergence_rows  # noqa: E402


def test_curves_are_compared_with_the_spread_of_plains():
    assert convergence.windows([1.0, 3.0, 5.0], 2) == [2.0, 5.0]
    plain = [[1.0, 2.0], [3.0, 2.0]]
    assert convergence.spread(plain) == 1.0
    ours = [[2.0, 2.5], [2.0, 2.5]]
    assert convergence.apart({"plain": plain, "0.5": ours}) == {"0.5": 0.5}


def test_a_run_says_what_it_trained_and_how_far_it_is_from_plain(tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["--ways=plain,0.7", "--steps=4", "--window=2", "--seeds=1", "--batch=8"]
    arguments += ["--dtype=float32", f"--out={out}"]
    run_script(
        f"""
        import runpy, sys
        sys.path.append({str(ROOT / "benchmarks")!r})
        sys.argv = ["convergence.py", *{arguments!r}]
        runpy.run_path({str(ROOT / "benchmarks" / "convergence.py")!r}, run_name="__main__")
        """,
        JAX_PLATFORMS="cpu",
    )
    plain, ours, comparison = map(json.loads, out.read_text().splitlines())
    assert (plain["way"], ours["way"], comparison["way"]) == ("plain", "0.7", "comparison")
    assert len(plain["losses"]) == 2 and "recomputed" in ours["plan"]
    apart = max(abs(a - b) for a, b in zip(plain["losses"], ours["losses"], strict=True))
    assert comparison["0.7"] == pytest.approx(apart) and comparison["spread"] == 0.0
    assert apart < 1e-3 * plain["losses"][0]


def test_a_table_has_a_line_for_each_way(tmp_path, monkeypatch):
    row = {"model": "m", "dtype": "float32", "steps": 4, "accuracy": 0.5, "commit": "c"}
    rows = [
        {**row, "way": "plain", "losses": [2.0, 1.0]},
        {**row, "way": "plain", "losses": [4.0, 3.0]},
        {**row, "way": "0.5", "losses": [2.0, 1.5]},
        {"way": "comparison", "spread": 1.0, "0.5": 0.25},
    ]
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (tmp_path / "convergence_cpu.jsonl").write_text(text)
    monkeypatch.setattr(convergence_rows, "RESULTS", tmp_path)
    *_, plain, ours = convergence_rows.convergence().strip().splitlines()
    assert plain == "| m float32, 4 steps | `plain` | 2 | 1.0000 to 3.0000 | 50.0% | (1.0000) | c |"
    assert ours == "| m float32, 4 steps | `0.5` | 1 | 1.5000 to 1.5000 | 50.0% | 0.2500 | c |"
