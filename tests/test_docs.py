"""The code in README.md and on the pages of docs/ runs, as it stands."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/tutorial.md",
    "docs/policies.md",
    "docs/ffi.md",
    "docs/convolutions.md",
    "docs/sub-batches.md",
    "docs/compression.md",
)
MARKERS = {"gpu_compile": "jax_plugins.xla_cuda13"}
"""What a block may say that it needs, in a comment above it, and the module that brings it."""


class Block(NamedTuple):
    """A block of Python; `needs` is a key of MARKERS, or ""."""

    line: int
    needs: str
    code: str


def blocks(text):
    """The Python blocks of a page, in order."""
    pattern = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)^```$", re.M | re.S)
    return [
        Block(text.count("\n", 0, match.start(2)) + 1, match[1] or "", match[2])
        for match in pattern.finditer(text)
    ]


def execute(page, needs):
    """Runs the blocks of `page` whose needs are met, in one namespace, and counts them."""
    space, count = {"__name__": "__main__"}, 0
    for block in blocks((ROOT / page).read_text()):
        if block.needs in ("", *needs):
            padded = "\n" * (block.line - 1) + block.code  # errors name the page's own lines
            exec(compile(padded, page, "exec"), space)
            count += 1
    return count


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page):
    assert execute(page, needs=()) > 0


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.needs for b in blocks((ROOT / p).read_text()))]
)
def test_blocks_that_compile_for_a_gpu_run(page):
    pytest.importorskip(MARKERS["gpu_compile"])
    execute(page, needs=("gpu_compile",))


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page):
    text = (ROOT / page).read_text()
    assert text.count("```python") == len(blocks(text))
    assert {block.needs for block in blocks(text)} <= {"", *MARKERS}


def test_a_broken_block_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("text\n```python\nx = 1\n```\n```python\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError):
        execute("page.md", needs=())
