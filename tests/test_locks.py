"""benchmarks/locks.py: processes that compile together and time alone."""

from __future__ import annotations

import fcntl
import sys
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from locks import held


def is_held(path, how):
    """Whether somebody holds the lock of `path` so that it cannot be had."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_many_hold_it_together_and_one_alone(tmp_path):
    path = str(tmp_path / "lock")
    with held(path, alone=False), held(path, alone=False):
        assert is_held(path, fcntl.LOCK_EX) and not is_held(path, fcntl.LOCK_SH)
    with held(path, alone=True):
        assert is_held(path, fcntl.LOCK_SH)
    assert not is_held(path, fcntl.LOCK_EX)


def test_who_waits_to_be_alone_comes_before_those_who_ask_later(tmp_path):
    path, order = str(tmp_path / "lock"), []

    def hold(name, alone):
        with held(path, alone):
            order.append(name)

    with held(path, alone=False):
        first = threading.Thread(target=hold, args=("alone", True))
        first.start()
        while not is_held(f"{path}.next", fcntl.LOCK_EX):
            pass
        later = threading.Thread(target=hold, args=("later", False))
        later.start()
        later.join(0.2)
        assert order == []  # though others hold it, too
    first.join()
    later.join()
    assert order == ["alone", "later"]


def test_without_a_path_nothing_is_held():
    with held("", alone=True), held("", alone=True):
        pass
