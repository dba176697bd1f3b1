"""records: what this process tried for each program, for its later searches."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable

from vmem_jax.core.program import Program
from vmem_jax.search.attempt import Record

_PROGRAMS = 32
"""Programs that are remembered; the least recently used one is forgotten first."""

_records: collections.OrderedDict[Hashable, Record] = collections.OrderedDict()
_lock = threading.Lock()


def record_of(program: Program, options: object) -> Record:
    """The record of a program, planned and compiled by `options`."""
    key = program.fingerprint, repr(options)
    with _lock:
        record = _records.setdefault(key, Record())
        _records.move_to_end(key)
        if len(_records) > _PROGRAMS:
            _records.popitem(last=False)
        return record


def forget() -> None:
    """Forgets all of them."""
    with _lock:
        _records.clear()
