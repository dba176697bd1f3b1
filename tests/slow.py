"""Which tests are slow, by a recorded run, and which of them a run takes.

`tests/data/slow_tests.txt` has the tests that took longer than LONGER seconds, the slowest first. To
make it again:

    python -m pytest --durations=0 >log; python -m tests.slow log >tests/data/slow_tests.txt

With `--slow-share=N` a run takes one in N of them, drawn by `--slow-seed`: one of the N slowest, one
of the next N, and so on, so that every draw takes about as long. pytest's last line says how many it
left out. `.ci/run` draws by the commit. A test that the file does not name runs always, and so does
one that is marked `always`.
"""

from __future__ import annotations

import collections
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

LONGER = 0.3
"""Seconds. The tests above it are a third of all and take nineteen twentieths of the time."""

_FILE = Path(__file__).parent / "data" / "slow_tests.txt"
_DURATION = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(\S.*)")


def slow_tests() -> dict[str, int]:
    """The slow tests and their ranks, the slowest first."""
    return {name: rank for rank, name in enumerate(_FILE.read_text().splitlines())}


def is_drawn(rank: int, share: int, seed: str) -> bool:
    """Whether the slow test with `rank` is among one in `share` of them, drawn by `seed`."""
    group, place = divmod(rank, share)
    return int(hashlib.sha256(f"{seed} {group}".encode()).hexdigest(), 16) % share == place


def slowest_first(lines: Sequence[str]) -> list[str]:
    """The slow tests of pytest's list of durations."""
    seconds: collections.Counter[str] = collections.Counter()
    for line in lines:
        if found := _DURATION.match(line):
            seconds[found[2]] += float(found[1])
    return [test for test, took in seconds.most_common() if took > LONGER]


if __name__ == "__main__":
    print(*slowest_first([line for log in sys.argv[1:] for line in open(log)]), sep="\n")
