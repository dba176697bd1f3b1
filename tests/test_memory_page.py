"""The page about memory: its values are the simulator's, and a browser shows it without errors."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import unit_costs
from networks import CONV, FC, network, with_algorithms

import vmem_jax
from vmem_jax import cli
from vmem_jax.core.convolution import Configuration, Epilogue, Micro
from vmem_jax.errors import show_nbytes
from vmem_jax.policy import Keep
from vmem_jax.report import picture
from vmem_jax.report.explain import explain
from vmem_jax.report.grouping import groups_of

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

WEIGHTS = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 6
BATCH = jax.ShapeDtypeStruct((256, 32), jnp.float32)


def train_step(params, x):
    def loss_of(params):
        y = x
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}</script>"):  # a name must not end the page's script
                y = jnp.tanh(y @ w) * y
        return jnp.square(y).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pytest.importorskip("plotly")
    step = vmem_jax.jit(train_step, budget=0.5, donate_argnums=0)
    points = vmem_jax.pareto(step, WEIGHTS, BATCH, compile=False, points=3)
    path = tmp_path_factory.mktemp("report") / "memory.html"
    assert step.report(WEIGHTS, BATCH, path=path, points=points) == path
    return path


@pytest.fixture(scope="module")
def data(page):
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text())
    return json.loads(found[1])


def test_both_panels_add_up_to_the_simulators_bytes(data):
    for panel in data["panels"]:
        for by in ("kinds", "layers"):
            columns = [sum(values) for values in zip(*panel[by].values(), strict=True)]
            assert len(columns) == len(panel["at"]) <= picture.COLUMNS
            assert max(columns) == panel["peak"]["nbytes"]  # the peak is never left out
        held = sum(holder["nbytes"] for holder in panel["peak"]["holders"])
        assert held >= panel["peak"]["nbytes"] > 0 and Path(__file__).name in panel["peak"]["where"]
    plain, plan = data["panels"]
    assert plan["compiled"] <= data["budget"] < plain["compiled"]


def test_every_value_says_what_is_decided_and_why(data):
    decisions = {value["decision"] for value in data["values"]}
    assert {"held throughout", "kept", "recomputed"} <= decisions
    end = data["panels"][1]["seconds"]
    for value in data["values"]:
        assert value["reason"] and value["spans"]
        assert all(0 <= begin <= last <= end * (1 + 1e-9) for begin, last in value["spans"])
    sizes = [value["nbytes"] for value in data["values"]]
    assert sizes == sorted(sizes, reverse=True)
    again = [value for value in data["values"] if value["decision"] == "recomputed"]
    assert any(len(value["spans"]) > 1 for value in again)


def test_a_convolution_says_how_it_runs():
    program, costs = with_algorithms(
        program := network([CONV, CONV, FC]).program, unit_costs(program)
    )
    (first, second, *_) = sorted(costs.convolutions)
    halves = (Micro(4, 1, (), 2**20, 1.0),) * 2
    ways = {
        first: Configuration(halves, Epilogue.BIAS_RELU),
        second: Configuration((Micro(8, 1, (), 2**21, 1.0),)),
    }
    plan = dataclasses.replace(Keep().plan(program, costs, None), convolutions=(*ways.items(),))
    about = explain(program, costs, plan, budget=None, plain_need=1, compiled_need=1)
    values = picture.picture(program, costs, about)["values"]
    reasons = [value["reason"] for value in values]
    assert any(
        "2 micro-batches, with 1.00 MiB of workspace, bias and relu fused" in r for r in reasons
    )
    assert any("its convolution takes 2.00 MiB of workspace" in r for r in reasons)
    assert sum("convolution" in r for r in reasons) == 2
    decided = lambda value: {value["decision"], *value["also"]}
    (halved,) = [value for value in values if "micro-batches" in value["reason"]]
    assert halved["decision"] == "kept" and decided(halved) == {"kept", "micro-batched", "fused"}
    assert not any(
        decided(value) & {"micro-batched", "fused"} for value in values if value is not halved
    )


def test_a_short_lived_value_is_decided_by_how_it_is_made(monkeypatch):
    """Then fusing, or micro-batches, is all that was decided."""
    monkeypatch.setattr(picture, "_decision", lambda *about: ("short-lived", "read soon"))
    program, costs = with_algorithms(program := network([CONV, FC]).program, unit_costs(program))
    first = min(costs.convolutions)
    for micros, epilogue, decided in [
        (1, Epilogue.BIAS, ("fused", [])),
        (2, Epilogue.NONE, ("micro-batched", [])),
        (2, Epilogue.BIAS, ("micro-batched", ["fused"])),
        (1, Epilogue.NONE, ("short-lived", [])),
    ]:
        way = Configuration((Micro(8 // micros, 1, (), 2**20, 1.0),) * micros, epilogue)
        plan = dataclasses.replace(Keep().plan(program, costs, None), convolutions=((first, way),))
        about = explain(program, costs, plan, budget=None, plain_need=1, compiled_need=1)
        values = picture.picture(program, costs, about)["values"]
        (made,) = [value for value in values if "its convolution" in value["reason"]]
        assert (made["decision"], made["also"]) == decided


def test_every_decision_has_a_colour():
    """Of the decisions that this package's source has, the page knows all."""
    source = Path(picture.__file__).read_text()
    decisions = {*re.findall(r'return "([^"]+)", f?"', source), "micro-batched", "fused"}
    script = (Path(picture.__file__).parent / "pages/memory.js").read_text()
    colours = re.search(r"const DECISIONS = {(.*)}", script)[1]
    known = {a or b for a, b in re.findall(r'(?:"([^"]+)"|(\w+)): "#', colours)}
    assert decisions == known


def test_lanes_and_trade_are_there(data):
    compute = [span for span in data["spans"] if span["lane"] == "compute"]
    assert {"forward", "backward", "recompute"} <= {span["category"] for span in compute}
    ends = [span["end"] for span in compute]
    assert ends == sorted(ends) and len(data["points"]) >= 2


def test_the_page_needs_no_network_and_is_small(page):
    text = page.read_text()
    assert page.stat().st_size < 3e6
    own = re.sub(r'<script id="plotly".*?</script>', "", text, flags=re.S)
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://", own)

    class Balance(HTMLParser):
        open = 0

        def handle_starttag(self, tag, attrs):
            self.open += tag == "script"

        def handle_endtag(self, tag):
            self.open -= tag == "script"

    parser = Balance()
    parser.feed(text)
    assert parser.open == 0 and text.count("<script") == 3


def test_without_plotly_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"vmem_jax\[report\]"):
        vmem_jax.jit(train_step, budget=0.7).report(WEIGHTS, BATCH)


def test_many_layers_come_in_few_groups_of_neighbours():
    names = [f"Net/stage{i}/block{j}/conv" for i in range(3) for j in range(40)] + ["Net/head"]
    groups = groups_of(dict.fromkeys(names, 1))
    assert set(groups) == {*names} and 3 < len({*groups.values()}) <= 11
    order = list(dict.fromkeys(groups[name] for name in names))
    for group in order:  # neighbours stand together
        at = [i for i, name in enumerate(names) if groups[name] == group]
        assert at == [*range(at[0], at[-1] + 1)]
    assert groups_of({"": 5, "a": 1}) == {"": "(no layer)", "a": "a"}


# -- in a browser

UNREADABLE = (ROOT / "tests/data/unreadable.js").read_text()


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here (Debian's package chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize(
    "scheme, width",
    [("light", 1280), ("dark", 1280), ("light", 480), ("dark", 480), ("light", 360)],
)
def test_a_browser_shows_the_page(page, data, chromium, scheme, width):
    tab = chromium.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    wrong = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    asked = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(page.as_uri())
    tab.wait_for_selector("html[data-ready]", state="attached")
    assert tab.evaluate("document.documentElement.dataset.theme") == scheme
    assert tab.locator("#values tbody tr").count() == len(data["values"])
    for by in ("kinds", "layers"):
        tab.click(f"[data-by={by}]")
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate(UNREADABLE) == []
    assert re.search("layer3.*compiled", tab.locator("#legend").text_content())
    tab.fill("#filter", "recomputed")
    assert 0 < tab.locator("#values tbody tr").count() < len(data["values"])
    tab.click("[data-by=kinds]")
    tab.evaluate("document.getElementById('areas').scrollIntoView()")
    box = tab.locator("#areas").bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 120)
    tab.wait_for_function(
        "document.querySelector('#areas .hoverlayer').textContent.length > 9", timeout=10000
    )
    shown = tab.locator("#areas .hoverlayer").text_content()
    assert re.search(r"activation : [\d.]+ KiB", shown)
    range_of = lambda chart: tab.evaluate(f"document.getElementById('{chart}').layout.xaxis.range")
    before = range_of("lanes")
    tab.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 120)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 130, steps=5)
    tab.mouse.up()
    tab.wait_for_function(f"document.getElementById('lanes').layout.xaxis.range[1] < {before[1]}")
    assert range_of("lanes") == range_of("areas")  # zooming one zooms the other
    tab.add_style_tag(content=".note {color: var(--line)}")
    assert tab.evaluate(UNREADABLE)  # it would be found
    tab.close()
    assert wrong == []
    assert {url.partition(":")[0] for url in asked} <= {"file", "blob", "data"}


def test_the_picture_of_the_readme_is_drawn_from_its_row(tmp_path, monkeypatch):
    pytest.importorskip("playwright")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import picture as drawing

    row, readme = json.loads(drawing.ROW.read_text()), (ROOT / "README.md").read_text()
    for panel in row["panels"]:
        assert show_nbytes(panel["compiled"]) in readme
    for theme in ("light", "dark"):
        assert f"docs/figures/memory-{theme}.png" in readme
        assert (drawing.FIGURES / f"memory-{theme}.png").stat().st_size < 100_000
    if CHROMIUM is None:
        pytest.skip("no Chromium here (Debian's package chromium)")
    light, dark = (path.read_bytes() for path in drawing.photograph(out=tmp_path))
    width = drawing.WIDTH - 2 * 24  # the margins of the page
    for png in (light, dark):
        assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20]) == width
    assert light != dark


# -- the command line, on a step of the user's own

OWN = """
import jax, jax.numpy as jnp
import vmem_jax

def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

def step(weights, x):
    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))

budgeted = vmem_jax.jit(step, budget=0.9, donate_argnums=0)

def shapes():
    weights = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 4
    return weights, jax.ShapeDtypeStruct((64, 16), jnp.float32)
"""


def test_commands_take_the_users_own_step(tmp_path, capsys, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    own = tmp_path / "own_train_step.py"
    own.write_text(OWN)
    asked = [f"{own}:step", "--args", f"{own}:shapes", "--donate", "0"]
    assert cli.main(["plan", *asked, "--budget", "0.9"]) == 0
    assert "peak: plain jit" in capsys.readouterr().out
    assert cli.main(["plan", *asked, "--sweep", "2"]) == 0
    assert "step: seconds against bytes" in capsys.readouterr().out
    assert cli.main(["profile", *asked]) == 0
    assert "Predicted step time" in capsys.readouterr().out
    out = tmp_path / "own.html"
    assert cli.main(["report", f"{own}:budgeted", *asked[1:3], "--out", str(out)]) == 0
    assert '"name":"step"' in out.read_text()


@pytest.mark.parametrize(
    "argv, says",
    [
        (["plan", "no.py:step", "--args", "no.py:shapes", "--budget", "0.5"], "there is no file"),
        (["plan", "train.py:step", "--budget", "0.5"], "needs --args"),
        (["plan", "resnet11", "--budget", "0.5"], "needs --batch"),
        (["plan", "json:nothing", "--args", "json:loads", "--budget", "0.5"], "has no 'nothing'"),
    ],
)
def test_a_wrong_step_is_one_message(argv, says, capsys):
    assert cli.main(argv) == 2
    assert says in capsys.readouterr().err
