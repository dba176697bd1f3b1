"""The papers' tables: the manifest is valid, calculations are the papers', pages and plots follow."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flax")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import cells  # noqa: E402
import compared  # noqa: E402
import computed  # noqa: E402
import manifest  # noqa: E402
import measured  # noqa: E402
import pages  # noqa: E402
import papers_rows  # noqa: E402
import plots  # noqa: E402
import records  # noqa: E402
import summaries  # noqa: E402
import variants  # noqa: E402
from records import LEAST_OF  # noqa: E402

from vmem_jax.models import build_network  # noqa: E402

TABLES = {name: manifest.load(name) for name in manifest.names()}
PAGES = pages.pages()

WANTED = """
vdnn_fig11 vdnn_fig12 vdnn_fig14 vdnn_fig15
vdnnpp_fig9 vdnnpp_fig10 vdnnpp_table2 vdnnpp_table4 vdnnpp_table5
modnn_fig6 modnn_fig7 modnn_fig8
superneurons_fig10 superneurons_fig11 superneurons_fig12
superneurons_table1 superneurons_table2 superneurons_table3 superneurons_table4 superneurons_table5
ucudnn_fig9 ucudnn_fig10 ucudnn_fig11 ucudnn_fig12 ucudnn_fig13 ucudnn_fig14
"""


def test_every_table_of_the_papers_has_a_file():
    assert set(TABLES) == set(WANTED.split())


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_table_names_networks_policies_and_sources(name):
    table = TABLES[name]
    assert table.published and all(figure.at and figure.what for figure in table.published)
    assert table.cases or table.computed or table.scripts
    assert not table.computed or table.computed in computed.COMPUTED
    for model, batch in {(case.model, case.batch) for case in table.cases}:
        build_network(model, batch=batch)
    place = variants.Place("h200")
    for variant, asked in {(case.variant, case.asked) for case in table.cases}:
        if variant in ("plain", *variants.WRAPPED):
            assert not asked
        else:
            policy = variants.policy_of(variant.partition(":")[0])  # without techniques
            assert not isinstance(policy, str) or policy in manifest.WAYS
            if asked.startswith(LEAST_OF):  # what the same table asks for
                other = asked.removeprefix(LEAST_OF)
                assert {c.network for c in table.cases if c.asked == asked} <= {
                    c.network for c in table.cases if (c.variant, c.asked) == (other, "least")
                }
                continue
            nbytes = place.budget_nbytes(asked, 1000, ()) if asked != "none" else 1
            assert nbytes is None or nbytes > 0
    assert set(table.core) <= set(table.cases) and bool(table.core) == bool(
        table.runs and table.cases
    )
    for script in table.scripts:
        assert (ROOT / "benchmarks" / script.split()[0]).exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ("lenet?a=b", "no policy 'lenet'"),
        ("lenet", "no policy 'lenet'"),
        ("vdnn?colour=red", r"no option \['colour'\]; `vdnn` has offload, algorithms"),
        ("vdnn?offload=some", "`offload`='some'"),
    ],
)
def test_a_variant_that_there_is_not(words, message):
    with pytest.raises(ValueError, match=message):
        variants.policy_of(words)


def test_options_of_a_variant():
    assert variants.policy_of("modnn") == "modnn"
    assert variants.policy_of("superneurons?cache=false").cache is False
    policy = variants.policy_of("ucudnn?optimisation=wr&limit=64MiB&batch_sizes=undivided")
    assert (policy.limit, policy.batch_sizes) == (64 * 2**20, "undivided")


def test_what_is_run_on_a_card_next_is_of_the_tables(tmp_path):
    cases = {case for table in TABLES.values() for case in table.cases}
    asked = [case for each in papers_rows.ROWS for case in each.cases]
    assert asked and set(asked) <= cases and len(set(asked)) == len(asked)
    assert all(0 <= each.conv < each.seconds for each in papers_rows.ROWS)
    first, *others = papers_rows.ROWS
    facts = {"image": 1, "optimizer": "sgd", "budget": None, "outcome": "no"}
    out = tmp_path / "rows.jsonl"
    records.write(out, [records.Record(**(dataclasses.asdict(c) | facts)) for c in first.cases])
    assert papers_rows.left(out, [], []) == others
    skipped = papers_rows.left(out, [], [others[0].network])
    assert others[0] not in skipped and skipped[-1] == others[-1]
    one = others[0]
    assert papers_rows.left(out, [f"{one.network}:{one.dtype}"], []) == [one]


# -- calculations


@pytest.mark.parametrize("name", ["superneurons_fig10", "superneurons_table1"])
def test_calculated_as_published(name):
    table = TABLES[name]
    if name == "superneurons_table1":  # of the ResNets see tests/policy/test_superneurons.py
        drawn = computed._drawings().alexnet()
        order = tuple(range(len(drawn.program.steps)))
        cells = computed._strategies("AlexNet", drawn.program, drawn.costs({}, rate=1e9), order)
    else:
        cells = computed.COMPUTED[table.computed](table)
    theirs = {(f.how, f.what): f.value for f in table.published if f.of.startswith("AlexNet")}
    assert len(cells) >= 4
    for cell in cells:
        printed = theirs[cell.how, cell.what]
        # 1132.155 is a tenth of a MB more than the tensors that the paper lists
        assert cell.value == pytest.approx(printed, abs=0.2 if cell.what == "peak" else 0)


def test_with_the_cache_less_moves_the_more_memory_there_is():
    """SuperNeurons, Table 3, from the least memory to that of plain."""
    moved = {}
    for cell in pages.calculated(TABLES["superneurons_table3"]):
        network, _, budget = cell.of.partition(" at ")
        moved.setdefault((network, cell.how), {})[float(budget.split()[0])] = cell.value
    for network in computed.CACHED:
        off, on, auto = (moved[network, how] for how in ("off", "on", "auto"))
        assert len(on) == computed.POINTS and len(off) >= computed.POINTS - 1
        assert [on[b] for b in sorted(on)] == sorted(on.values(), reverse=True)
        assert on[max(on)] == 0 < on[min(on)]
        assert all(on[b] < off[b] for b in off if b < max(off))
        assert all(auto[b] <= on[b] for b in auto)


def small(name, network, *variants):
    """A table of that name with other networks."""
    cases = manifest.cases_of([network], ["float32"], variants)
    return dataclasses.replace(TABLES[name], cases=tuple(cases))


def test_no_pool_is_smaller_than_what_is_live():
    table = small("vdnnpp_table5", "alexnet:8", "vdnnpp?offload=all@none", "vdnnpp@none")
    cells = {(c.how, c.what): c.value for c in computed.pools(table)}
    for variant in ("vdnnpp?offload=all", "vdnnpp"):
        served = [value for (how, what), value in cells.items() if how == variant and "," in what]
        assert len(served) == 4 and min(served) >= cells[variant, "aggregate"] > 0
    assert cells["vdnnpp?offload=all", "pinned"] > cells["vdnnpp", "pinned"] == 0


def test_the_lower_bound_is_of_one_sample():
    few, many = (
        computed.lower_bounds(small("modnn_fig6", f"alexnet:{n}", "plain")) for n in (8, 64)
    )
    ideal, bound, reduction = (c.value for c in many)
    assert bound == few[1].value  # whatever the batch
    assert reduction == pytest.approx(ideal / bound) and ideal > few[0].value > bound


# -- rows


def row(**facts):
    about = {"image": 224, "optimizer": "sgd", "budget": None, "outcome": "ok", "batch": 256}
    about |= {"model": "vgg16", "dtype": "bfloat16", "device": "h200"}
    return records.Record(**(about | facts))


GIB = 2**30
ROWS = {
    manifest.Case(r.model, r.batch, r.dtype, r.variant, r.asked): r
    for r in (
        row(variant="plain", need=17 * GIB, device="", step_seconds=(0.06, 0.061, 0.09),
            plain_seconds=0.061),
        row(variant="modnn", asked="0.35", budget=0.35, need=5 * GIB, predicted_seconds=0.26),
        row(variant="vdnn?offload=all", asked="none", need=5 * GIB),
        row(variant="vdnn", asked="0.35", outcome="BudgetError: no", lowest=6 * GIB,
            lowest_compiled=True),
        row(variant="auto", asked="0.35", budget=0.35, need=5 * GIB, predicted_seconds=0.07,
            device="", step_seconds=(0.04941,), plain_seconds=0.061),
    )
}  # fmt: skip


def test_a_page_says_what_is_measured_predicted_failed_and_not_there():
    text = pages.pivot(TABLES["modnn_fig8"], ROWS, "bfloat16", "seconds")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    found = {line[0]: line[1:3] for line in lines if line}
    assert found["plain"] == ["61.00 (1.000)", ""]
    assert found["auto, at 35%"] == ["49.41 (0.810)", ""]
    assert found["modnn, at 35%"] == ["*260*", ""]
    assert found["vdnn, at 35%"] == ["fails (6.00 GiB)", ""]
    assert len(found) == 6  # the header and its rule
    assert "4 of 120 rows" in pages.block(TABLES["modnn_fig8"], ROWS)
    short = summaries.summary(TABLES["modnn_fig8"], ROWS)
    assert "| `auto@0.35` | 0.81 |" in short and "| `vdnn@0.35` | fails (6.00 GiB) |" in short
    assert "modnn@0.35" not in short  # predicted alone
    assert pages.pivot(TABLES["modnn_fig8"], {}, "bfloat16", "seconds") == ""
    least = row(variant="vdnn", asked="least", outcome="BudgetError: no", lowest=6 * GIB)
    assert cells.cell(least, "need") == "fails (6.00 GiB, predicted)"
    least = dataclasses.replace(least, lowest_compiled=True)
    assert cells.cell(least, "need") == "6.00"


def test_what_ran_takes_the_place_of_what_was_compiled(tmp_path):
    ran = [r for r in ROWS.values() if not r.device]
    compiled = [dataclasses.replace(r, device="h200", step_seconds=()) for r in ROWS.values()]
    records.write(tmp_path / "papers_b_compiled.jsonl", compiled)
    assert all(r.device for r in pages.all_rows(tmp_path).values())
    for name in ("papers_a.jsonl", "papers_c.jsonl"):  # whichever is read first
        records.write(tmp_path / name, ran)
        assert pages.all_rows(tmp_path) == ROWS
        (tmp_path / name).unlink()
    assert pages.count(TABLES["modnn_fig8"], ROWS).startswith("4 of 120 rows exist; 2 ran")


@pytest.mark.parametrize("name", ["modnn_fig8", "vdnn_fig11"])
def test_the_same_rows_draw_the_same_picture(name, tmp_path):
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        assert plots.draw(TABLES[name], ROWS, cells.value_of, path)
    text = paths[0].read_text()
    assert text == paths[1].read_text()
    assert "vgg16 (256)" in text and "dc:date" not in text and len(text) < 40_000
    plain = {case: r for case, r in ROWS.items() if r.variant == "plain"}
    assert plain and not plots.draw(TABLES[name], plain, cells.value_of, paths[0])  # no comparison
    assert not paths[0].exists() and not plots.draw(TABLES[name], {}, cells.value_of, paths[0])


@pytest.mark.parametrize(
    "name", ["papers.md", "benchmarks.md", "../README.md", "rows/papers.md", "rows/benchmarks.md"]
)
def test_the_page_is_what_the_rows_say(name):
    assert PAGES[name] == (pages.DOCS / name).read_text(), "run `python benchmarks/pages.py`"


def test_every_table_stands_on_a_page_and_is_linked_to_its_rows():
    named = lambda page: [name for _, name, *_ in pages.BLOCK.findall(PAGES[page])]
    assert sorted(named("papers.md")) == sorted(TABLES)
    assert sorted(named("benchmarks.md") + named("../README.md")) == sorted(measured.TABLES)
    for name in TABLES:
        assert f"(rows/papers.md#{name})" in PAGES["papers.md"]
        assert f"{{ #{name} }}" in PAGES["rows/papers.md"]


def test_a_row_is_compared_with_plain_of_its_own_process(tmp_path, monkeypatch):
    plain = row(variant="plain", need=8 * GIB, step_seconds=(2.0, 2.0))
    auto = row(variant="auto", asked="0.5", budget=0.5, need=4 * GIB, step_seconds=(3.0,))
    again = dataclasses.replace(plain, step_seconds=(6.0,))
    records.write(tmp_path / "some.jsonl", [plain, auto, again, auto])
    monkeypatch.setattr(compared, "RESULTS", tmp_path)
    first, last = compared.compared("some")
    assert (first.ratio, last.ratio, last.share) == ("1.500", "0.500", "50%")
    assert compared.latest([first, last]) == [last]


def test_what_takes_too_long_is_a_row_and_is_not_run_again(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = (
        f"{sys.executable} benchmarks/papers.py --table=vdnn_fig12 --networks=vgg16:64".split()
    )
    command += f"--dtypes=bfloat16 --device=h200 --limit=0.01 --out={out}".split()
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = records.read(out)
    assert [r.variant for r in found] == [
        "plain", "vdnn?offload=all", "vdnn?offload=conv", "offload",
    ]  # fmt: skip
    assert all(r.outcome.startswith("time limit") and r.device == "h200" for r in found)
    assert first.stdout.count("time limit") == 4
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert again.stdout == "" and records.read(out) == found
