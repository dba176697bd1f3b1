"""Which slow tests a run takes."""

import re
from pathlib import Path

from slow import is_drawn, slow_tests, slowest_first

RANKS = range(1000)


def drawn(share: int, seed: str) -> list[int]:
    return [rank for rank in RANKS if is_drawn(rank, share, seed)]


def test_of_each_few_slow_tests_as_slow_as_one_another_one_is_drawn():
    assert [rank // 4 for rank in drawn(4, "a")] == [*range(250)]
    assert drawn(4, "a") != drawn(4, "b")
    assert drawn(1, "a") == [*RANKS]


def test_every_test_is_drawn_by_some_commit():
    assert {rank for seed in range(100) for rank in drawn(4, str(seed))} == {*RANKS}


def test_the_seconds_of_a_test_and_its_setup_count_together():
    log = [
        "0.20s call     a.py::b",
        "0.20s setup    a.py::b",
        "0.30s call     a.py::c",
        "9.00s call     a.py::d[x y]",
        "3 passed in 9.00s",
    ]
    assert slowest_first(log) == ["a.py::d[x y]", "a.py::b"]


def test_the_recorded_tests_are_there():
    root = Path(__file__).parent.parent
    for name in slow_tests():
        file, function = re.fullmatch(r"(.+?)::(?:\w+::)?(\w+)(?:\[.*\])?", name).groups()
        assert f"def {function}(" in (root / file).read_text(), name
