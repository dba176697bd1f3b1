"""Which slow tests a run takes."""

import re
from pathlib import Path

import pytest
from slow import is_drawn, slow_tests, slowest_first

TESTS = [f"tests/test_a.py::test_{i}" for i in range(1000)]


def test_of_the_slow_tests_one_in_so_many_is_drawn():
    drawn = {seed: {t for t in TESTS if is_drawn(t, 4, seed)} for seed in ("a", "b")}
    assert all(len(some) == pytest.approx(250, rel=0.2) for some in drawn.values())
    assert drawn["a"] != drawn["b"]
    assert all(is_drawn(test, 1, "a") for test in TESTS)


def test_every_test_is_drawn_by_some_commit():
    assert all(any(is_drawn(test, 4, str(seed)) for seed in range(100)) for test in TESTS)


def test_the_seconds_of_a_test_and_its_setup_count_together():
    log = [
        "0.50s call     a.py::b",
        "0.60s setup    a.py::b",
        "1.00s call     a.py::c",
        "9.00s call     a.py::d[x y]",
        "3 passed in 9.00s",
    ]
    assert slowest_first(log) == ["a.py::d[x y]", "a.py::b"]


def test_the_recorded_tests_are_there():
    root = Path(__file__).parent.parent
    for name in slow_tests():
        file, function = re.fullmatch(r"(.+?)::(?:\w+::)?(\w+)(?:\[.*\])?", name).groups()
        assert f"def {function}(" in (root / file).read_text(), name
