"""The search for the largest batch: which batches are tried, and how it goes on from its rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("flax")

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import largest
from manifest import Case
from records import Record


@pytest.mark.parametrize("most", [0, 15, 16, 100, 448, 1000, 5000])
@pytest.mark.parametrize("close", [0.0, 0.1, 0.3])
def test_the_largest_is_found_in_few_batches(most, close):
    fits, fails, tries = 0, None, 0
    while (batch := largest.next_batch(fits, fails, 448, 16, close)) is not None:
        tries += 1
        assert batch % 16 == 0 and batch > fits and (fails is None or batch < fails)
        if batch <= most:
            fits = batch
        else:
            fails = batch
    assert fits <= most and fails > most  # both ends were tried
    assert fails - fits <= max(close * fits, 16)
    assert tries <= 14


def row(batch, outcome="ok", need=100, variant="auto"):
    made = Record("vgg16", batch, 224, "float32", "sgd", variant, None, outcome, need=need)
    return Case("vgg16", batch, "float32", variant, "12GiB"), made


def test_it_goes_on_from_its_rows():
    like = Case("vgg16", 0, "float32", "auto", "12GiB")
    rows = dict(
        [
            row(16),
            row(64),
            row(128, "time limit: 600 s passed", None),  # as good as one that does not fit
            row(256, "ok", 201),  # plain jit, over it
            row(512, variant="superneurons"),
        ]
    )
    assert largest.known(rows, like, budget=200) == (64, 128)
    assert largest.known({}, like, budget=200) == (0, None)


def test_the_papers_batches_are_those_of_its_table():
    assert largest.published() == {
        "alexnet": 1792,
        "vgg16": 224,
        "inception4": 240,
        "resnet50": 384,
        "resnet101": 256,
        "resnet152": 176,
    }
