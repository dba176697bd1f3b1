"""The code in README.md and on the pages of docs/ runs, and their commands exist, as they stand."""

import re
import runpy
import shlex
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest

from vmem_jax import POLICIES, cli

pytest.importorskip("flax")
pytest.importorskip("equinox")

ROOT = Path(__file__).parent.parent
MARKERS = {"gpu_compile": "jax_plugins.xla_cuda13"}
"""What a block may say that it needs, in a comment above it, and the module that brings it."""

WORDS = 20_000
"""Of README.md, CHANGELOG.md and docs/*.md together; tables of docs/rows/ are data."""


class Block(NamedTuple):
    """A fenced block; `needs` is a key of MARKERS, or ""."""

    line: int
    needs: str
    language: str
    code: str


def blocks(text):
    """The blocks of a page, in order."""
    pattern = re.compile(r"(?:<!-- needs: (\w+) -->\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)
    return [
        Block(text.count("\n", 0, match.start(3)) + 1, match[1] or "", match[2], match[3])
        for match in pattern.finditer(text)
    ]


def on(page, *languages):
    return [b for b in blocks((ROOT / page).read_text()) if b.language in languages]


PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
PYTHON = [page for page in PAGES if on(page, "python")]
COMMANDS = [
    (page, line) for page in PAGES for b in on(page, "sh") for line in b.code.splitlines() if line
]


def execute(page, needs):
    """Runs the Python blocks of `page` whose needs are met, in one namespace, and counts them."""
    space, count = {"__name__": "__main__"}, 0
    for block in on(page, "python"):
        if block.needs in ("", *needs):
            padded = "\n" * (block.line - 1) + block.code  # errors name the page's own lines
            exec(compile(padded, page, "exec"), space)
            count += 1
    return count


@pytest.mark.always
@pytest.mark.parametrize("page", PYTHON)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    assert execute(page, needs=()) > 0


@pytest.mark.always
@pytest.mark.gpu_compile
@pytest.mark.parametrize("page", [p for p in PYTHON if any(b.needs for b in on(p, "python"))])
def test_blocks_that_compile_for_a_gpu_run(page):
    pytest.importorskip(MARKERS["gpu_compile"])
    execute(page, needs=("gpu_compile",))


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page):
    found, text = blocks((ROOT / page).read_text()), (ROOT / page).read_text()
    assert len(re.findall(r"^ *(?:```|~~~)", text, re.M)) == 2 * len(found)
    assert {block.needs for block in found} <= {"", *MARKERS}
    assert {block.language for block in found} <= {"python", "sh", "text"}


@pytest.mark.parametrize(
    "law",
    [
        "test_plans_are_valid_and_fit",
        "test_recomputation_passes_through_no_effect",
        "test_plans_are_valid_with_effects_and_donation",
        "test_never_a_higher_peak_than_keep",
        "test_program_without_steps",
    ],
)
def test_the_policy_of_the_page_keeps_the_laws_of_all(law, monkeypatch):
    """What tests/policy/test_conformance.py demands of every registered policy."""
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where its dataclass is looked up
    exec(on("docs/contributing.md", "python")[0].code, module.__dict__)
    monkeypatch.setitem(POLICIES, "largest-first", module.LargestFirst)
    runpy.run_path(str(ROOT / "tests/policy/test_conformance.py"))[law](name="largest-first")


# -- commands


def check(command):
    """Raises where `command` is none that this checkout has, or has an option that it has not."""
    program, *words = shlex.split(command)
    if program == "vmem-jax":
        cli._parser().parse_args(words)
    elif program == "sh" or program.startswith("."):
        script, *rest = [program, *words][program == "sh" :]
        assert (ROOT / script).is_file(), script
        if script == ".ci/run":
            wanted = re.search(r'wanted=" \$\{\*:-(.*)\} "', (ROOT / script).read_text())[1]
            assert set(rest) <= set(wanted.split())
    elif program == "python" and words[0] == "-m":
        module = words[1].replace(".", "/")
        files = [ROOT / f"{module}.py", ROOT / module / "__main__.py"]
        source = [f.read_text() for f in files if f.is_file()]
        assert source, words[1]
        assert_flags(words[2:], source[0])
    elif program == "python":
        assert_flags(words[1:], (ROOT / words[0]).read_text())
    else:
        raise AssertionError(f"no way to check `{command}`: add it here")


def assert_flags(words, source):
    """That a script defines the options in `words`, and its files exist unless it writes them."""
    for word in words:
        flag = re.fullmatch(r"--(\w+)(?:=.*)?", word)
        assert flag, word
        assert re.search(rf'(?:DEFINE_\w+\(\s*"|"--){flag[1]}"', source), word


@pytest.mark.parametrize("page, command", COMMANDS)
def test_a_command_exists_with_its_options(page, command):
    check(command)


@pytest.mark.parametrize(
    "command",
    [
        "vmem-jax plan resnet50 --batch 8 --budgets 0.5",
        "vmem-jax plans resnet50",
        "sh scripts/walk.sh",
        ".ci/run lint dogs",
        "python benchmarks/papers.py --tables=vdnn_fig11",
        "python -m tests.fuzzy --seed=1",
        "make docs",
    ],
)
def test_a_wrong_command_fails(command):
    with pytest.raises((AssertionError, SystemExit, OSError)):
        check(command)


PLANS = [line for _, line in COMMANDS if line.startswith("vmem-jax plan")]
SMALL = ["--batch", "4", "--image", "32", "--classes", "10", "--head-width", "16"]


OWN_STEP = """
import jax, jax.numpy as jnp

def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w)))(w)

def shapes():
    return jnp.ones((64, 64)), jnp.ones((512, 64))
"""


@pytest.mark.parametrize("command", PLANS)
def test_a_plan_command_runs_on_a_small_network(command, capsys, tmp_path):
    """With the options of the page, and a network or a step that takes a second."""
    words = shlex.split(command)[1:]
    own = ".py:" in words[1]
    if own:
        (tmp_path / "train.py").write_text(OWN_STEP)
        words = [word.replace("path/to", str(tmp_path)) for word in words]
    else:
        words[1] = "vgg16"
    if "--target" in words:
        pytest.skip("tests marked gpu_compile compile for cards that are not there")
    if "--budget" in words:
        words[words.index("--budget") + 1] = "0.95"
    assert cli.main([*words, *([] if own else SMALL)]) == 0
    assert "compiled" in capsys.readouterr().out


# -- the pages as a whole


def test_the_pages_are_short():
    pages = [ROOT / page for page in (*PAGES, "CHANGELOG.md")]
    words = {page.name: len(page.read_text().split()) for page in pages}
    assert sum(words.values()) <= WORDS, words
    assert words["papers.md"] <= 4_000 and words["benchmarks.md"] <= 2_500


def test_the_reading_grade_is_the_stated_one(monkeypatch):
    pytest.importorskip("textstat", reason="textstat is not here (dependency group docs)")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import reading_grade

    said = (ROOT / "docs/contributing.md").read_text()
    stated = float(re.search(r"Flesch-Kincaid grade ([\d.]+)", said)[1])
    assert reading_grade.grade(reading_grade.prose(ROOT)) == pytest.approx(stated, abs=0.2)
    easy, hard = "The cat sat. It ate.", "Considerable simplification necessitates comprehension."
    assert reading_grade.grade(easy) < stated < reading_grade.grade(hard)


def test_what_is_read_of_a_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from reading_grade import paragraphs

    page = """# A heading

A *first* `x.y(z)` paragraph, 2.1 % of
[a page](page.md#there):

```python
code = 1
```

- an **item**
- another ![picture](a.png) <!-- no -->

| a | table |
|---|---|
"""
    assert [*paragraphs(page)] == [
        "A first code paragraph, 21 % of a page.",
        "an item.",
        "another.",
    ]


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert all(Path(page).name in nav for page in PAGES if page != "README.md")


def test_a_broken_block_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("text\n```python\nx = 1\n```\n```python\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError):
        execute("page.md", needs=())
