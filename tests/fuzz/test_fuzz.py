"""A minute of random programs, seeded by the commit; and that broken libraries are caught."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

from . import check, driver, ledger
from .check import BUDGET, CRASHED, ENDED, FIT, HUNG, INVALID, OVER, UNTRUE
from .child import Child
from .driver import (
    Counts,
    Settings,
    cores_of,
    known,
    reproduce,
    run,
    run_one,
    seeds_from,
    single,
)
from .known import KNOWN
from .layers import LAYERS
from .options import Options, draw_options
from .programs import VERSION, build, draw_spec
from .results import WRONG, distance
from .shrink import shrink

SECONDS = 40

ROOT = Path(__file__).parents[2]


def seed_of_commit() -> int:
    """A seed that differs from commit to commit; one and the same without git."""
    here = Path(__file__).parent
    command = ["git", "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return zlib.crc32(asked.stdout.encode())


@pytest.mark.always
def test_a_minute_of_random_programs_finds_nothing_new():
    counts = Counts()
    run(Settings(), seeds_from(seed_of_commit()), SECONDS, counts.add)
    print(json.dumps(counts.summary(), indent=1))
    found = [f"{s}: {row['detail']}\n  {reproduce(row)}" for s, row in counts.unknown.items()]
    assert not found, "\n".join(found)


MENDED = [json.loads(line) for line in Path(__file__).with_name("mended.jsonl").open()]
"""Programs and options that were findings. Three named a lowest peak which was then refused: its plan
was of loops with other stacks, which the search makes for the budget, and the second had another.
One more did so with what is compressed.
Three named one above plain jit's need, which was predicted at more than four times as much. One
named that of another policy's plan, which was not asked for again. Two named plans that another
process did not come across. One lacks a backward pass, and was refused what plain jit needs where
more is predicted. One named one above plain jit's need, since it counted constants, which XLA keeps
with the code. Of the last XLA:CPU let a kernel write over what it still reads (0.11.2, 0.12)."""


@pytest.mark.parametrize("which", range(len(MENDED)))
def test_what_was_found_stays_mended(which):
    row = run_one(Settings(), MENDED[which]["spec"], Options(**MENDED[which]["options"]))
    assert row["outcome"] in (FIT, BUDGET), row
    if row["outcome"] == BUDGET:
        assert row["asked"]


# -- programs


def test_a_program_is_determined_by_its_seed():
    for seed in range(5):
        a, b = draw_spec(seed), draw_spec(seed)
        assert a == b == json.loads(json.dumps(a))
        assert draw_options(seed, 1) == draw_options(seed, 1)
        for x, y in zip(build(a).args[2:], build(b).args[2:], strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_spec_of_another_generator_is_refused():
    with pytest.raises(ValueError):
        build({**draw_spec(0), "version": VERSION + 1})


def test_seeds_give_every_kind_of_layer():
    names = {name for seed in range(400) for name, _ in draw_spec(seed)["layers"]}
    assert names == set(LAYERS)


# -- what must be caught

SPEC = {
    "version": VERSION,
    "seed": 1,
    "shape": [32, 16, 8],
    "dtype": "float32",
    "layers": [["dense", 0], ["norm", 1], ["activation", 2], ["dense", 3]],
    "skips": [],
    "loss": "mean",
    "update": "sgd",
}
FITS = Options(share=0.95, form="bytes", mode="call", jit={"policy": "auto"})
FITS_NOT = Options(share=0.05, form="bytes", mode="call", jit={"policy": "auto"})

BREAKS = {
    "other results": (
        WRONG,
        Options(1.5, "bytes", "call", {"policy": "auto"}),  # without barriers it needs more
        # every value that goes through a fence of the rewritten program is changed by 1 %
        """
from jax import lax
from jax.interpreters import mlir
changed = lambda *xs: [x * 1.01 if x.dtype.kind == "f" else x for x in xs]
mlir.register_lowering(lax.optimization_barrier_p, mlir.lower_fun(changed, multiple_results=True))
""",
    ),
    "over the budget": (
        OVER,
        Options(0.3, "bytes", "call", {"policy": "exact"}),
        """
from vmem_jax.search import search
def blind(compiled, f=search.need_nbytes):
    return f(compiled) // 10
search.need_nbytes = blind
""",
    ),
    "an exception": (
        CRASHED,
        FITS,
        """
from vmem_jax.policy import Auto
def broken(*args):
    raise KeyError("broken")
Auto.plan = broken
""",
    ),
    "a ValueError of somebody else": (
        CRASHED,
        FITS,
        """
from vmem_jax.policy import Auto
Auto.plan = lambda *args: min([])
""",
    ),
    "the end of the process": (
        ENDED,
        FITS,
        """
import os
from vmem_jax.policy import Auto
Auto.plan = lambda *args: os.abort()
""",
    ),
    "a hang": (
        HUNG,
        FITS,
        """
from vmem_jax.policy import Auto
def broken(*args):
    while True: pass
Auto.plan = broken
""",
    ),
    "a lowest peak that is none": (
        UNTRUE,
        FITS_NOT,
        """
from vmem_jax import errors
def broken(self, *, lowest_peak, f=errors.BudgetError.__init__, **others):
    f(self, lowest_peak=others["budget"] + 1, **others)
errors.BudgetError.__init__ = broken
""",
    ),
}


def test_meta_the_program_of_these_tests_fits():
    row = run_one(Settings(), SPEC, FITS)
    assert row["outcome"] == FIT and row["need"] <= row["budget"] < row["plain_need"]
    assert run_one(Settings(), SPEC, FITS_NOT, ask=False)["outcome"] == BUDGET


def test_a_share_is_one_of_what_the_step_needs_with_the_same_donation():
    """With what the first argument gives up, plain jit needs less."""
    given = {"policy": "auto", "donate_argnums": (0, 1)}
    spec = {**SPEC, "seed": 2, "update": "adamw"}
    row = run_one(Settings(), spec, Options(0.95, "share", "call", given))
    assert row["outcome"] == FIT and row["budget"] < int(0.95 * row["plain_need"])


@pytest.mark.parametrize("name", BREAKS)
def test_meta_a_broken_library_is_caught(name):
    outcome, options, preface = BREAKS[name]
    row = run_one(Settings(limit=10, preface=preface), SPEC, options)
    assert row["outcome"] == outcome, row
    assert row["signature"].startswith(outcome)
    assert "--spec=" in reproduce(row)


def test_meta_a_comparison_that_does_not_end_is_no_finding():
    """Runs that round at random are compiled for it; the library is done by then."""
    preface = f"""
from {check.__name__.rpartition(".")[0]} import check
def broken(*args):
    while True: pass
check.compare = broken
"""
    row = run_one(Settings(limit=10, preface=preface), SPEC, FITS)
    assert row["outcome"] == INVALID and not row["signature"], row


@pytest.mark.parametrize("always, outcome", [(False, FIT), (True, HUNG)], ids=["once", "always"])
def test_meta_what_takes_too_long_is_run_again_alone(always, outcome, tmp_path, monkeypatch):
    preface = f"""
from pathlib import Path
from vmem_jax.policy import Auto
begun = Path({str(tmp_path / "begun")!r})
def broken(*args):
    while True: pass
if {always} or not begun.exists():
    Auto.plan = broken
begun.touch()
"""
    monkeypatch.setattr(driver, "draw_spec", lambda seed: SPEC)
    monkeypatch.setattr(driver, "options_of", lambda seed, settings: [(0, FITS, False)])
    rows, counts = [], Counts()
    run(Settings(processes=2, limit=10, preface=preface), [1], 60, rows.append)
    [row] = rows
    counts.add(row)
    assert row["outcome"] == outcome and row["slow"] and bool(row["signature"]) == always
    assert counts.slow == 1 and counts.outcomes[HUNG] == always


@pytest.mark.parametrize("alone", [True, False])
def test_meta_alone_a_program_is_timed_by_the_clock(alone, monkeypatch):
    """One that takes a hundred processor seconds in one on the clock."""
    monkeypatch.setattr(Child, "_seconds", lambda self: 100 * time.monotonic())
    if alone:
        assert run_one(Settings(limit=30), SPEC, FITS)["outcome"] == FIT
        return
    child = Child(Settings().environment, limit=30)
    [row] = child.rows(SPEC, [(0, FITS, False)])
    child.close()
    assert row["outcome"] == INVALID, row  # plain jit, which comes first, hangs


def test_the_docs_have_the_totals_of_the_ledger():
    with (ROOT / "benchmarks" / "results" / "fuzz.jsonl").open() as file:
        totals = ledger.totals(map(json.loads, file))
    assert totals.strip() in (ROOT / "docs" / "contributing.md").read_text()


def test_meta_a_finding_is_shrunk():
    outcome, options, preface = BREAKS["an exception"]
    settings = Settings(preface=preface)
    spec = {**SPEC, "layers": SPEC["layers"][:2], "update": "momentum"}
    row, _ = shrink(settings, run_one(settings, spec, options))
    assert row["outcome"] == outcome
    assert len(row["spec"]["layers"]) == 1 and row["spec"]["update"] == "sgd"


def test_meta_a_minute_with_a_finding_fails(monkeypatch):
    counts = Counts()
    run(Settings(preface=BREAKS["an exception"][2], each=2), range(3), 120, counts.add)
    assert counts.outcomes[CRASHED] and counts.unknown
    for signature in counts.unknown:
        monkeypatch.setitem(KNOWN, signature, "it is known")
        assert known(signature)
    assert not counts.unknown


def test_a_ledger_adds_up(tmp_path):
    counts, path = Counts(), tmp_path / "ledger.jsonl"
    made = {"option": 0, "signature": "", "agreed": "exact"}
    for seed in range(3):
        counts.add({"seed": seed, "outcome": FIT, **made})
    counts.add({"seed": 4, "outcome": BUDGET, "asked": True, **made})
    for commit in ("a", "b"):
        book = ledger.Ledger(str(path))
        book.write(ledger.row_of(Counts(), Settings(), 3.1, commit))  # as the run begins
        book.write(ledger.row_of(counts, Settings(), 12.4, commit))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["commit"] for row in rows] == ["a", "b"]
    assert (rows[0]["programs"], rows[0]["fit"], rows[0]["lowest_met"]) == (4, 3, 1)
    assert "| 8 | 6 | 2 | 2 of 2 | 0 |" in ledger.totals(rows)


def test_a_run_that_is_killed_leaves_its_row(tmp_path):
    path = tmp_path / "ledger.jsonl"
    run = ["--seconds=300", f"--ledger={path}", f"--out={tmp_path / 'rows.jsonl'}", "--seed=3"]
    with subprocess.Popen([sys.executable, "-m", "tests.fuzz", *run], cwd=ROOT) as process:
        try:
            for _ in range(600):
                if path.exists() or process.poll() is not None:
                    break
                time.sleep(0.2)
        finally:
            process.kill()
    [row] = [json.loads(line) for line in path.read_text().splitlines()]
    written = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert 1 <= row["programs"] <= len(written) and not row["crashed"]


def test_leaving_out_code_generation_changes_no_peak():
    names = ("plain_need", "need", "lowest_peak", "attempts")
    options = [FITS, FITS_NOT, Options(0.7, "bytes", "call", {"policy": "recompute"})]
    # without emitters for fusions XLA of JAX 0.10.2 makes other ones, which changes peaks a little
    apart = 0.03 if jax.__version__.startswith("0.10.") else 0
    for seed in (1001, 1003):
        with single(Settings()) as fast, single(Settings(codegen="full")) as full:
            for one in options:
                rows = [run(draw_spec(seed), one) for run in (fast, full)]
                assert rows[0]["outcome"] == rows[1]["outcome"] and rows[0]["plain_need"]
                numbers = [[row.get(name) or 0 for name in names] for row in rows]
                np.testing.assert_allclose(*numbers, rtol=apart)


def test_processes_get_cores_of_their_own():
    eight = [core for i in range(8) for core in cores_of(i, 8, range(32))]
    assert sorted(eight) == [*range(32)]
    assert [cores_of(i, 8, range(16)) for i in (0, 7)] == [[0, 1, 2, 3], [14, 15, 0, 1]]
    assert cores_of(1, 2, [4, 7]) == [7, 4]


def test_distance_sees_nan_and_infinities():
    nan, inf = float("nan"), float("inf")
    assert distance(np.array([1.0, nan, inf]), np.array([1.0, nan, inf])) == 0
    assert distance(np.array([1.0]), np.array([nan])) == inf
    assert distance(np.array([inf]), np.array([-inf])) == inf
    assert distance(np.zeros(0), np.zeros(0)) == 0


def test_gradients_of_integers_are_compared():
    none = np.zeros(3, jax.dtypes.float0)
    assert distance(none, none) == 0
