"""The programs of examples/ run as they stand, train, and are short."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("optax")

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(path):
    losses = runpy.run_path(str(path), run_name="__main__")["losses"]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert len(path.read_text().splitlines()) < 60


def test_there_are_examples():
    assert EXAMPLES
