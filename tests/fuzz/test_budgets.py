"""Where the budgets of random programs lie, and what rows and the ledger say of it."""

from __future__ import annotations

import types

import pytest

from vmem_jax.core.cards import CARDS

from . import ledger
from .check import BUDGET, FIT, Memory, memory_of
from .driver import Counts, Settings, single
from .options import QUICK, Options, draw_options
from .test_fuzz import FITS, SPEC


def test_budgets_lie_between_what_no_plan_frees_and_plain_jits_need():
    """But for some of them, as shares of the whole need are."""
    need, floor, count = 1_000_003, 900_001, {"room": 0, "need": 0}
    for seed in range(200):
        one = draw_options(seed, 0)
        count[one.of] += 1
        nbytes, given = one.nbytes(need, floor), one.keywords(need, floor)["budget"]
        assert (
            int(given * need) == nbytes
            if one.form == "share"
            else nbytes == int(str(given).strip("B"))
        )
        assert one.of == "need" or floor <= nbytes <= need
    assert 140 < count["room"] < 180
    for share, form in ((0.0, "bytes"), (0.0, "share"), (1.0, "share")):
        one = Options(share, form, "call", {}, of="room")
        assert one.nbytes(need, floor) == (need if share else floor)
    assert FITS.nbytes(need, floor) == 950_002  # rows that do not say of what


@pytest.mark.parametrize("donated", [(), (0, 1, 2)])
@pytest.mark.parametrize("form", ["bytes", "share", "text"])
def test_a_row_says_whether_a_plan_was_possible(form, donated):
    spec, given = {**SPEC, "update": "adamw"}, {"policy": "auto", "donate_argnums": donated}
    with single(Settings()) as run_one:
        all_of_it = run_one(spec, Options(1.0, form, "call", given, of="room"))
        least = run_one(spec, Options(0.0, form, "call", given, of="room"), ask=False)
        below = run_one(spec, Options(0.02, form, "call", given), ask=False)
    assert all_of_it["outcome"] == FIT and all_of_it["possible"]
    assert least["outcome"] == BUDGET and least["possible"] and least["budget"] == least["floor"]
    assert below["outcome"] == BUDGET and not below["possible"]
    counts = Counts()
    for row in (all_of_it, least, below):
        counts.add(row)
    assert (counts.possible, counts.possible_fit) == (2, 1)
    assert counts.summary()["share_that_fits"] == 0.5


def test_no_plan_frees_the_workspace_of_a_product_by_cublas():
    """Nor is there one where XLA's own kernels make it."""
    stats = types.SimpleNamespace(
        argument_size_in_bytes=700,
        output_size_in_bytes=300,
        alias_size_in_bytes=200,
        temp_size_in_bytes=2**25 + 100,
    )
    of = lambda text: memory_of(
        types.SimpleNamespace(memory_analysis=lambda: stats, as_text=lambda: text)
    )
    call = "  %d.1 = (f32[4,8]{1,0}, s8[33554432]{0}) custom-call(%a, %b), custom_call_target="
    assert of(call + '"__cublas$lt$matmul"') == Memory(2**25 + 900, 2**25 + 800)
    # that of a convolution depends on how it is done, which a plan may change
    assert of(call + '"__cudnn$convForward"') == of("fusion(%a)") == Memory(2**25 + 900, 800)


def test_the_ledger_tells_what_fits_of_the_possible():
    counts = Counts()
    for outcome, possible in ((FIT, True), (BUDGET, True), (BUDGET, False)):
        row = {"seed": 0, "outcome": outcome, "possible": possible, "signature": ""}
        counts.add({**row, "agreed": "exact"})
    row = ledger.row_of(counts, Settings(), 1, "a")
    assert "| 1 of 2 |" in ledger.totals([row])
    before = {n: value for n, value in row.items() if not n.startswith("possible")}
    assert "| 1 of 2 |" in ledger.totals([row, before])
    assert "| – |" in ledger.totals([before])


def test_batches_are_divided_though_their_parts_are_tiny():
    """As on a card, whose kernels take longer to start than parts of these programs take."""
    machines = [draw_options(seed, 0).jit.get("machine") for seed in range(200)]
    assert 20 < machines.count(QUICK) < 60 and {*CARDS} < {*machines}
    given = {"policy": "auto", "allow": ("order", "sub_batches")}
    layers = [["dense", 0], ["activation", 1], ["dense", 2]]
    spec = {**SPEC, "shape": [128, 64, 8], "layers": layers}
    with single(Settings()) as run_one:
        outcomes = [
            run_one(spec, Options(0.1, "bytes", "call", {**given, "machine": machine}, of="room"))
            for machine in ("h200", QUICK)
        ]
    assert [row["outcome"] for row in outcomes] == [BUDGET, FIT]
