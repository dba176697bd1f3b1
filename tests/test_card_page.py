"""The page of a card, from rows, and the rows of its links."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import run_script

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import card_page  # noqa: E402


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines(folder):
    table = card_page.card_page("h100", folder).splitlines()[5:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in table if line)
    return {what: (measured, assumed) for what, measured, assumed in cells}


def test_a_card_without_rows_says_what_would_measure_it(tmp_path):
    page = lines(tmp_path)
    assert len(page) == 10
    assert page["memory"] == ("", "79.1 GiB")
    assert page["products, bfloat16"] == ("no rows: `rates.py --kinds=product`", "712 TFLOP/s")
    assert page["link to host memory, out"] == ("no rows: `links.py`", "55.3 GB/s")


def test_the_figures_are_those_of_the_rows(tmp_path):
    product = {"kind": "product", "us": 1.0, "gb_per_s": 1.0}
    small = {"kind": "pass", "us": 10.0, "gb_per_s": 9000.0, "tflops": 0.0}  # 90 MB: in the cache
    large = {"kind": "pass", "us": 1000.0, "gb_per_s": 2900.0, "tflops": 0.0}
    rates = [{**product, "tflops": t} for t in (100, 700, 800, 820, 830, 840)]
    write(tmp_path / "rates_h100.jsonl", *rates, small, large)
    link = {"kind": "link", "direction": "out"}
    links = [{"devices": 1, "gb_per_s": 50.0, "of_alone": 1.0}]
    links += [{"devices": 2, "gb_per_s": 30.0, "of_alone": 0.6}]
    write(tmp_path / "links_h100.jsonl", *({**link, **each} for each in links))
    step = {"model": "vit", "batch": 64, "profile": False}
    write(
        tmp_path / "training_steps_h100.jsonl",
        {**step, "way": "plain", "ms": 100.0},
        {**step, "way": "0.5", "ms": 100.0, "predicted_ms": 10.0},  # another row of it follows
        {**step, "way": "0.5", "ms": 100.0, "predicted_ms": 98.0},
        {**step, "way": "0.25", "ms": 100.0, "predicted_ms": 104.0},
        {**step, "way": "0.2", "ms": None, "predicted_ms": None},
        {**step, "way": "0.5", "ms": 100.0, "predicted_ms": 99.0, "profile": True},
    )
    page = lines(tmp_path)
    assert page["products, bfloat16, best of 6"][0] == "820 TFLOP/s"
    assert page["passes over device memory, best of 1"][0] == "2.90 TB/s"
    assert page["link to host memory, out"][0] == "50.0 GB/s, 60% of it on 2"
    assert page["link to host memory, into"][0] == "no rows: `links.py`"
    found = {what: measured for what, (measured, _) in page.items() if what.startswith("seconds")}
    assert found == {
        "seconds of 2 plans, predicted by these rates": "off by 3.0% in the median, 4% at most",
        "seconds of 1 plans, predicted with `profile=True`": "off by 1.0% in the median, 1% at most",
    }


def test_links_of_two_devices_are_rows(tmp_path):
    out = tmp_path / "rows.jsonl"
    run_script(
        f"""
        import runpy, sys
        sys.path.append({str(ROOT / "benchmarks")!r})
        sys.argv = ["links.py", "--mib=1", "--runs=2", "--out={out}"]
        runpy.run_path({str(ROOT / "benchmarks" / "links.py")!r}, run_name="__main__")
        """,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["direction"], row["devices"]) for row in rows] == [
        (way, count) for count in (1, 2) for way in ("out", "into", "both")
    ]
    alone = {row["direction"]: row["gb_per_s"] for row in rows if row["devices"] == 1}
    for row in rows:
        assert row["of_alone"] == pytest.approx(row["gb_per_s"] / alone[row["direction"]])
