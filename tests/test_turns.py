"""Variants that take turns with plain jit: what fails, what is left out, what is written."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax")

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import manifest  # noqa: E402
import papers  # noqa: E402
import records  # noqa: E402
import run  # noqa: E402
import turns  # noqa: E402
import variants  # noqa: E402
from turns import Pace, TimeUp, Turns, at_most  # noqa: E402
from variants import Variant  # noqa: E402

from vmem_jax.errors import BudgetError  # noqa: E402

WORK = types.SimpleNamespace(
    init=lambda key: jnp.zeros(()),
    random_batch=lambda key: jnp.ones(()),
)

NEED = {"vdnn": 20 * 2**30, "modnn": 20 * 2**30}


def variant(name, log=None):
    """A variant that counts up; its name says how it fails."""

    def step(state, batch):
        if log is not None:
            log.append(name)
        if name == "full" and int(state) >= 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        if name == "unpinned":
            raise MemoryError("no host memory")
        return state + batch, {"loss": state + batch}

    def build():
        if name == "hopeless":
            raise ValueError("no plan")
        while name == "endless":
            time.sleep(0.01)
        return step, {"pinned_nbytes": NEED.get(name)}

    return Variant(name, None, "", build)


def heats(ways, log=None, plain="plain", **pace):
    """(Names, outcomes and blocks of each heat, the reference)."""
    turns = Turns(WORK, Pace(**({"rounds": 3, "steps": 2} | pace)), time.monotonic())
    reference = variant(plain, log) if plain else None
    found = []
    for some in turns.heats(reference, ways, lambda way: [variant(way, log)]):
        assert all(v.state is not None for v in some if v.run)
        found.append([(v.name, v.outcome.partition(":")[0], len(v.seconds)) for v in some])
    return found, reference


def test_what_fails_is_a_row_and_the_others_go_on():
    found, plain = heats(["hopeless", "full", "unpinned", "a"])
    assert found == [
        [("hopeless", "ValueError", 0), ("full", "JaxRuntimeError", 0),
         ("unpinned", "MemoryError", 0), ("a", "ok", 3)]
    ]  # fmt: skip
    assert len(plain.seconds) == 3


def test_they_take_turns_block_by_block():
    log = []
    heats(["a", "b"], log, rounds=2, steps=2)
    assert log[-12:] == ["plain", "plain", "a", "a", "b", "b"] * 2


@pytest.mark.parametrize("scale, warned", [(1.0, False), (1.01, False), (1.1, True)])
def test_what_computes_something_else_is_told(scale, warned, caplog):
    def wrong(way):
        made = variant(way)
        run = made.run

        def scaled(state, batch):
            state, metrics = run(state, batch)
            return state, {**metrics, "loss": metrics["loss"] * scale}

        made.run = scaled
        return [made]

    turns = Turns(WORK, Pace(rounds=1, steps=1), time.monotonic())
    with caplog.at_level("WARNING"):
        [[each]] = turns.heats(plain := variant("plain"), ["a"], wrong)
    assert each.plain_loss == plain.loss
    assert ("a@ has a loss of" in caplog.text) == warned


@pytest.mark.parametrize(
    "ways, together, expected",
    [
        ("abcde", 2, ["ab", "cd", "e"]),
        ("abcde", 0, ["abcde"]),
        (["a", "hopeless", "b", "c"], 2, [["a", "hopeless", "b"], ["c"]]),
        (["vdnn", "modnn", "a", "b"], 0, [["vdnn", "modnn"], ["a", "b"]]),  # pinned host memory
        ([], 2, [[]]),
    ],
)
def test_heats_are_of_a_few_variants_and_plain(ways, together, expected):
    found, plain = heats(ways, together=together)
    assert [[name for name, *_ in some] for some in found] == [list(some) for some in expected]
    assert len(plain.seconds) == 3 * len(expected)


def test_every_row_knows_the_plain_jit_of_its_own_heat():
    turns = Turns(WORK, Pace(rounds=3, steps=1, together=1), time.monotonic())
    medians = []
    for [each] in turns.heats(plain := variant("plain"), "ab", lambda way: [variant(way)]):
        assert each.plain_seconds == sorted(plain.seconds[-3:])[1]
        medians.append(each.plain_seconds)
        assert plain.loss == each.loss == each.plain_loss  # as many steps
    assert plain.plain_seconds == pytest.approx(sum(sorted(plain.seconds)[2:4]) / 2)
    found, reference = heats("a", plain=None)
    assert reference is None and found == [[("a", "ok", 3)]]
    found, _ = heats("a", plain="full")
    assert found == [[("a", "ok", 3)]]


def test_what_there_is_no_time_for_is_logged_and_left_out(caplog):
    found, plain = heats(["a", "endless", "b"], seconds=1.0)
    [[(name, outcome, blocks)]] = found
    assert (name, outcome) == ("a", "ok") and blocks == len(plain.seconds) > 0
    assert "no time is left for endless, b" in caplog.text


def test_a_variant_that_passes_its_limit_is_a_row_and_the_others_go_on():
    found, plain = heats(["endless", "a"], limit=2.0, seconds=600)
    assert found == [[("endless", "time limit", 0), ("a", "ok", 3)]] and len(plain.seconds) == 3


def test_no_alarm_is_left_for_those_that_were_made_in_time(monkeypatch):
    """As where a second alarm comes before the first has left the block."""

    @contextlib.contextmanager
    def left_on(seconds):
        yield
        signal.setitimer(signal.ITIMER_REAL, 3600)
        if not math.isinf(seconds):
            raise TimeUp

    monkeypatch.setattr(turns, "at_most", left_on)
    found, plain = heats("a", seconds=60)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert found == [[]] and len(plain.seconds) == 3


def test_a_block_ends_when_its_time_is_up():
    with pytest.raises(TimeUp), at_most(0.01):
        time.sleep(5)
    with at_most(float("inf")):
        pass
    with at_most(60):
        pass
    time.sleep(0.02)  # nothing is left that could end this


# -- the rows of the papers' tables


@pytest.mark.parametrize(
    "way, need, reason",
    [
        ("auto@12GiB", 2**30, "plain jit needs 1.00 GiB"),
        ("auto@12GiB", 2**40, ""),
        ("modnn@12GiB", 2**30, ""),  # not said to be of use below plain jit alone
        ("auto@0.5", None, "it is a share of what plain jit needs, which failed"),
        ("auto@least", None, ""),
        ("exact@none", None, ""),
    ],
)
def test_what_says_nothing_beside_plain_jit_is_not_run(monkeypatch, way, need, reason):
    flags = types.SimpleNamespace(ways=["plain", way], below_plain=["auto@12GiB"])
    monkeypatch.setattr(run, "FLAGS", flags)
    steps = run.Steps.__new__(run.Steps)
    steps.plain_need = need
    assert steps._unneeded(way, way.partition("@")[2]) == reason


def record(**facts):
    about = {"image": 32, "optimizer": "sgd", "budget": None, "outcome": "ok"}
    about |= {"model": "densenet7k4", "batch": 2, "dtype": "float32"}
    return records.Record(**(about | facts))


def table(*ways, below_plain=True):
    cases = manifest.cases_of(["densenet7k4:2"], ["float32"], ways)
    like = manifest.load("vdnn_fig14")
    return dataclasses.replace(like, cases=tuple(cases), below_plain=below_plain)


@pytest.fixture
def flags(monkeypatch):
    found = {"device": "here", "rounds": 2, "steps": 1, "profile": 0.0, "conv": 0.0}
    found |= {"together": 1, "seconds": 0.0, "commit": "abc", "resume": True}
    found |= {"networks": [], "dtypes": [], "ways": [], "known": [], "core": False}
    found |= {"done": [], "list": False}
    flags = types.SimpleNamespace(**found)
    monkeypatch.setattr(papers, "FLAGS", flags)
    return flags


def test_all_rows_of_a_network_come_from_one_process(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    out = tmp_path / "rows.jsonl"
    flags.together = 3
    leasts = table("exact@least", "auto@least:exact", "auto@least:vdnn")  # of vdnn nothing is known
    tables = [table("exact@1KiB", "exact@1TiB"), table("plain", "exact@none"), leasts]
    papers.run_groups(tables, out)
    rows = {case.how: row for case, row in papers.read(out).items()}
    # plain needs less than 1 TiB
    assert list(rows) == ["plain", "exact@1KiB", "exact@none", "exact@least", "auto@least:exact"]
    failed = [how for how, row in rows.items() if row.outcome != "ok"]
    assert failed == ["exact@1KiB"] and rows[failed[0]].outcome.startswith("BudgetError")
    assert [len(r.step_seconds) for r in rows.values()] == [2, 0, 2, 2, 2]
    assert rows["auto@least:exact"].budget_nbytes == rows["exact@least"].need
    assert rows["auto@least:exact"].need <= rows["exact@least"].need
    assert all(r.plain_seconds for r in rows.values() if r.step_seconds)
    assert all(r.device == "" and r.compile_seconds > 0 for r in rows.values())
    assert rows["plain"].loss == rows["exact@none"].loss and rows["plain"].commit == "abc"


def test_the_core_of_a_table(flags):
    flags.table, flags.core = ["modnn_fig8"], True
    [few] = papers.selected()
    flags.core = False
    [all_] = papers.selected()
    assert {case.network for case in few.cases} == {"vgg16:256"} < {c.network for c in all_.cases}


def test_the_least_that_is_known_is_not_looked_for(tmp_path, monkeypatch):
    asked = []

    def compiled(work, place, policy, means, transport, nbytes, plan=None):
        asked.append(plan or nbytes)
        if nbytes < 1005 and plan is None:
            about = {"at": "", "compiled": True, "lowest_plan": "its plan"}
            raise BudgetError(policy=policy, budget=nbytes, lowest_peak=990, **about)
        return None, {}

    monkeypatch.setattr(variants, "_compiled", compiled)
    place = types.SimpleNamespace(shapes=lambda work: jnp.zeros(10))
    said = [990, "its plan"]  # what an error says; 40 are the arguments
    for known, searched, expected in [
        ([1000], True, [1020]),
        ([900], True, [918, *said]),
        ([900, 1000], True, [918, 1020]),
        ([900], False, [40, 918, *said]),
        ([989], False, [40, 1008]),
        ([1000], False, [40, *said]),
        ([], False, [40, *said]),
    ]:
        asked.clear()
        variants.budgeted(WORK, place, "vdnn", None, known, searched)()
        assert asked == expected
    rows = [record(variant="modnn", asked="least", need=6)]
    rows += [record(variant="modnn", asked="0.5", need=5), record(variant="auto", asked="0.5")]
    rows += [
        record(variant="vdnn", asked="least", outcome="no", lowest=7, lowest_compiled=True),
        record(variant="exact", asked="least", outcome="time limit: 1 s passed"),
        record(variant="exact", asked="0.5", need=8),
    ]
    records.write(tmp_path / "rows.jsonl", rows)
    about = {"model": "densenet7k4", "batch": 2, "dtype": "float32"}
    flags = types.SimpleNamespace(known=[str(tmp_path / "rows.jsonl")], **about)
    monkeypatch.setattr(run, "FLAGS", flags)
    steps = run.Steps.__new__(run.Steps)
    known = [steps._known(policy) for policy in ("modnn", "vdnn", "auto", "exact")]
    assert known == [((5,), True), ((7,), True), ((5,), False), ((8,), False)]  # auto asks modnn


def test_what_another_policy_needs_at_the_least(tmp_path, monkeypatch):
    """What ran counts before what was compiled, and what was just made before both."""
    about = {"asked": "least", "variant": "modnn"}
    no_plan = {"outcome": "no", "lowest": 7, "lowest_compiled": True}
    rows = [record(need=4, device="h200", **about), record(need=6, **about)]
    rows += [record(asked="0.5", variant="modnn", need=3), record(asked="least", variant="vdnn")]
    rows += [record(asked="least", variant="exact", **no_plan)]
    other = dataclasses.replace(rows[1], batch=4, need=2)
    for path, some in [("a.jsonl", rows[:1]), ("b.jsonl", [*rows[1:], other])]:
        records.write(tmp_path / path, some)
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    like = {"model": "densenet7k4", "batch": 2, "dtype": "float32"}
    flags = types.SimpleNamespace(known=paths, below_plain=[], ways=["plain"], **like)
    monkeypatch.setattr(run, "FLAGS", flags)
    steps = run.Steps.__new__(run.Steps)
    steps.min_peaks, steps.plain_need = {}, 10
    asked = lambda: [steps._min_peak_of(f"least:{policy}") for policy in ("modnn", "vdnn", "exact")]
    assert asked() == [6, None, 7]
    steps.min_peaks["modnn"] = 8
    assert asked() == [8, None, 7]
    assert steps._unneeded("auto@least:modnn", "least:modnn") == ""
    assert steps._unneeded("auto@least:vdnn", "least:vdnn") == "no row says how much that is"
    rows_of = {papers.case_of(row): row for row in rows[2:]}
    assert papers.min_peak_of(manifest.Case(*like.values(), "auto", "least:exact"), rows_of) == 7
    assert papers.min_peak_of(manifest.Case(*like.values(), "auto", "least:modnn"), rows_of) is None


def test_only_rows_that_are_missing_are_run_again(flags, tmp_path, monkeypatch, capsys):
    out, commands = tmp_path / "rows.jsonl", []
    done = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: commands.append(words) or done)
    there = [record(variant=v, asked=a) for v, a in [("plain", ""), ("a", "1GiB")]]
    records.write(out, [*there, there[0]])  # plain jit came with every process
    papers.run_groups([table("plain", "a@1GiB", "b@1GiB"), table("b@1GiB", below_plain=False)], out)
    papers.run_groups([table("plain", "a@1GiB")], out)
    [words] = commands
    assert "--ways=plain,b@1GiB" in words and "--below_plain=" in words
    assert "--precision=highest" in words
    assert records.read(out) == there
    no_plan = {"outcome": "BudgetError: no", "lowest": 7, "lowest_compiled": True}
    rows = [record(variant="c", asked=a, **no_plan) for a in ("1GiB", "least")]
    records.write(tmp_path / "known.jsonl", rows)
    flags.known = [str(tmp_path / "known.jsonl")]
    papers.run_groups([table("c@1GiB", "c@least")], out)
    assert "--ways=plain,c@least" in commands[-1] and len(commands) == 2
    flags.list = True
    papers.run_groups([table("c@least")], out)
    assert len(commands) == 2 and capsys.readouterr().out.endswith("float32: c@least\n")
    flags.list, flags.done = False, flags.known
    papers.run_groups([table("c@least", "d@least")], out)
    assert "--ways=plain,d@least" in commands[-1] and len(commands) == 3
    # a size that plain jit does not need says nothing, where the table asks for what does not fit
    records.write(tmp_path / "plain.jsonl", [record(variant="plain", need=2**20)])
    flags.done, flags.list = [str(tmp_path / "plain.jsonl")], True
    capsys.readouterr()
    papers.run_groups([table("d@1GiB", "d@1KiB"), table("e@1GiB", below_plain=False)], out)
    assert capsys.readouterr().out.endswith("float32: d@1KiB, e@1GiB\n")
