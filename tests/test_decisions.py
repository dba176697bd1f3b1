"""The record of decisions: a comparison fails where something got worse, and what is counted."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flax")

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import decision_rows  # noqa: E402
import decisions  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import records  # noqa: E402
from built import needs_cuda  # noqa: E402
from decision_cases import CASES  # noqa: E402
from decision_rows import Decision, Tolerances, changes  # noqa: E402
from processes import run_script  # noqa: E402

import vmem_jax  # noqa: E402
from vmem_jax.core.convolution import Configuration, Micro  # noqa: E402
from vmem_jax.core.plan import Plan, Transfer  # noqa: E402

ROWS = ROOT / "benchmarks" / "results" / "decisions_h200.jsonl"
SMALL = {case.name for case in CASES if case.small}

FITS = Decision(
    "fits",
    "ok",
    budget_nbytes=100,
    digest="a",
    predicted_need=98,
    need=99,
    predicted_seconds=1.0,
    plans=4,
    compiles=2,
    planning_seconds=2.0,
)
FAILS = dataclasses.replace(
    FITS, case="fails", outcome="BudgetError: too small", need=None, lowest=200
)


def worse(before, after, **how):
    """(Case, figure) of all that got worse."""
    pair = [{row.case: row for row in rows} for rows in (before, after)]
    return [(c.case, c.what) for c in changes(*pair, **how) if c.worse]


def changed(row, **fields):
    """What gets worse where `fields` of one of two rows change."""
    other = FAILS if row is FITS else FITS
    return worse([row, other], [dataclasses.replace(row, **fields), other])


def test_the_same_rows_differ_in_nothing():
    assert changes({"fits": FITS, "fails": FAILS}, {"fits": FITS, "fails": FAILS}) == []


@pytest.mark.parametrize("outcome", ["BudgetError: no plan", "Timeout: 300 s passed", "Crash: -9"])
def test_a_lost_budget_is_worse(outcome):
    assert ("fits", "outcome") in changed(FITS, outcome=outcome, need=None)


def test_a_budget_that_is_met_at_last_is_not():
    assert changed(FAILS, outcome="ok", need=90, lowest=None) == []


def test_more_than_the_budget_is_worse():
    assert changed(FITS, need=101) == [("fits", "need")]
    assert changed(FITS, need=100) == []


def test_slower_by_prediction_is_worse_from_one_percent():
    assert changed(FITS, predicted_seconds=1.02) == [("fits", "predicted_seconds")]
    assert changed(FITS, predicted_seconds=1.009) == []
    assert changed(FITS, predicted_seconds=0.5) == []
    assert changed(FAILS, predicted_seconds=2.0) == []  # of a plan that does not fit


def test_a_higher_lowest_peak_is_worse():
    assert changed(FAILS, lowest=203) == [("fails", "lowest")]
    assert changed(FAILS, lowest=None) == [("fails", "lowest")]
    assert changed(FAILS, lowest=201) == changed(FAILS, lowest=100) == []


@pytest.mark.parametrize("what", ["compiles", "planning_seconds"])
def test_only_sums_of_effort_count(what):
    more = dataclasses.replace(FITS, **{what: 2 * getattr(FITS, what)})
    less = dataclasses.replace(FAILS, **{what: 0})
    assert worse([FITS, FAILS], [more, FAILS]) == [("all cases", f"sum of {what}")]
    assert worse([FITS, FAILS], [more, less]) == []
    lax = Tolerances(compiles=1.0, planning=math.inf)
    assert worse([FITS, FAILS], [more, FAILS], tolerances=lax) == []


def test_a_case_that_is_missing_is_worse_unless_only_some_are_compared():
    assert worse([FITS, FAILS], [FITS]) == [("fails", "row")]
    assert worse([FITS, FAILS], [FITS], partial=True) == []
    assert worse([FITS], [FITS, FAILS]) == []


def test_the_command_prints_what_differs_and_its_status_tells(tmp_path):
    files = []
    for name, seconds in (("before", 1.0), ("after", 1.5), ("within", 1.005)):
        files.append(tmp_path / f"{name}.jsonl")
        row = dataclasses.replace(FITS, predicted_seconds=seconds, digest=name)
        decision_rows.write(files[-1], [row])
    command = [sys.executable, ROOT / "benchmarks" / "decisions.py"]
    of = lambda *pair: [*command, "--compare=" + ",".join(map(str, pair))]
    run = lambda *pair: subprocess.run(of(*pair), capture_output=True, text=True)
    slower, close = run(files[0], files[1]), run(files[0], files[2])
    assert slower.returncode == 1 and "WORSE" in slower.stdout and "+50.00%" in slower.stdout
    assert close.returncode == 0 and "digest" in close.stdout and "WORSE" not in close.stdout


# -- what is recorded


def plan(**fields):
    how = Configuration((Micro(4, 1, (), 64, 1e-3, 0),))
    given = dict(order=(0, 1, 0), transfers=(Transfer(0, 0, 1, 2, 3),), convolutions=((1, how),))
    given |= fields
    return Plan(
        "program", "auto", fenced=True, budget=1, predicted_peak=1, predicted_seconds=1, **given
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"order": (0, 1)},
        {"transfers": ()},
        {"looped": (1,)},
        {"convolutions": ()},
        {"sub_batches": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_digest_is_of_what_the_plan_does(fields):
    assert decisions.digest_of(plan(**fields)) != decisions.digest_of(plan())


def test_a_digest_leaves_out_what_was_measured():
    slower = Configuration((Micro(4, 1, (), 64, 2e-3, 0),))
    assert decisions.digest_of(plan(convolutions=((1, slower),))) == decisions.digest_of(plan())


def test_plans_and_compiles_are_counted_and_then_no_longer():
    def step(w, x):
        def loss(w):
            y = x
            for _ in range(6):
                y = jnp.tanh(y @ w)
            return y.sum()

        return w - jax.grad(loss)(w)

    w, x = jnp.ones((32, 32)), jnp.ones((2048, 32))
    own = {name: vars(policy).get("plan") for name, policy in vmem_jax.POLICIES.items()}
    with decisions.counting() as counters:
        compiled = vmem_jax.jit(step, budget=0.8, policy="recompute").lower(w, x).compile()
    assert counters["compile"].calls == len(compiled.attempts) + 1  # and plain jit
    assert counters["lower"].calls == counters["compile"].calls
    assert counters["plan"].calls >= len(compiled.attempts)
    assert all(counter.seconds > 0 for counter in counters.values())
    assert own == {name: vars(policy).get("plan") for name, policy in vmem_jax.POLICIES.items()}
    before = counters["compile"].calls
    jax.jit(step).lower(w, x).compile()
    assert counters["compile"].calls == before


def test_a_plan_that_asks_another_policy_is_one_plan():
    counter = decisions.Counter()
    inner = counter.wrap(lambda: 1)
    assert counter.wrap(lambda: inner() + inner())() == 2
    assert counter.calls == 1


def test_a_case_that_fails_dies_or_hangs_is_a_row():
    out = run_script(
        f"""
        import os, sys, time
        sys.path.append({str(ROOT / "benchmarks")!r})
        import decisions
        from decision_cases import CASES

        def fails(case, device): raise RuntimeError("on purpose")
        def dies(case, device): os._exit(3)
        def hangs(case, device): time.sleep(3600)
        for decisions.decide, limit in ((fails, 300), (dies, 300), (hangs, 1)):
            row = decisions.run(CASES[0], "h200", limit)
            assert row.case == CASES[0].name
            print(row.error)
        """,
        JAX_PLATFORMS="cpu",
    )
    assert out.split() == ["RuntimeError", "Crash", "Timeout"]


def test_every_case_has_a_name_of_its_own_and_every_row_a_case():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    rows = [*decision_rows.read(ROWS)]
    assert rows == [name for name in names if name in rows]
    assert set(rows) >= SMALL and 10 <= len(SMALL) <= 15


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", sorted(SMALL))
def test_nothing_got_worse(name, tmp_path):
    """A small case, planned and compiled again, beside its row in the repository."""
    before = {name: decision_rows.read(ROWS)[name]}
    there = before[name].versions["jaxlib"]
    if (here := records.versions()["jaxlib"]) != there:
        pytest.skip(f"the rows are of jaxlib {there}, and this is {here}")
    moves = before[name].transfers or before[name].outcome != "ok"  # errors say what helps
    if moves:
        needs_cuda()
    command = [sys.executable, ROOT / "benchmarks" / "decisions.py", f"--only=^{re.escape(name)}$"]
    subprocess.run([*command, f"--out={tmp_path / 'rows.jsonl'}"], check=True, timeout=300)
    after = decision_rows.read(tmp_path / "rows.jsonl")
    assert after
    found = changes(before, after, Tolerances(planning=math.inf))
    assert not [change for change in found if change.worse], "\n" + decision_rows.table(found)
