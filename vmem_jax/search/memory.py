"""memory: what plans of a program were found to need, for later searches of the same process.

A plan that was compiled is a candidate for every budget that it fits, so the minimum peak that an
error names is met when it is asked for, and a larger budget never ends in a slower plan.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable, Iterable

from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program

_PROGRAMS = 64
"""Programs that are remembered; the one that was not asked for the longest is forgotten first."""

_PLANS = 16
"""Plans of each: the lowest and the latest."""

_known: collections.OrderedDict[Hashable, dict[Plan, int]] = collections.OrderedDict()
_lock = threading.Lock()


def key_of(program: Program, options: object) -> Hashable:
    """What distinguishes a program, and how it is planned and compiled, from others."""
    return program.fingerprint, repr(options)


def proved(key: Hashable) -> list[tuple[Plan, int]]:
    """The plans of `key` that were compiled, and the bytes that they need."""
    with _lock:
        if key in _known:
            _known.move_to_end(key)
        return [*_known.get(key, {}).items()]


def keep(key: Hashable, plans: Iterable[tuple[Plan, int]]) -> None:
    """Remembers that `plans` need so many bytes."""
    with _lock:
        known = _known.setdefault(key, {})
        known.update(plans)
        while len(known) > _PLANS:
            lowest = min(known, key=lambda plan: known[plan])
            known.pop(next(plan for plan in known if plan is not lowest))
        _known.move_to_end(key)
        while len(_known) > _PROGRAMS:
            _known.popitem(last=False)


def forget() -> None:
    """Forgets everything."""
    with _lock:
        _known.clear()
