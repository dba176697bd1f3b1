"""A lock file by which processes compile together and time alone.

Several benchmarks on one card would disturb each other's timings; their compilations, most of their
time, hardly do. So each holds the lock with the others while it compiles, and alone while it times.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator


@contextlib.contextmanager
def held(path: str, alone: bool) -> Iterator[None]:
    """Holds the lock of the file `path`, alone or with others; nothing without a path.

    Who waits for it comes before all who ask later, so that no process waits until none compiles.
    """
    if not path:
        yield
        return
    with open(path, "a") as file, open(f"{path}.next", "a") as turn:  # closing them releases both
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield
