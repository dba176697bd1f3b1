"""memory: the compiled needs of a program's plans, for later searches of the same process.

Every compiled plan is a candidate for each budget that it fits. So the minimum peak that an error
names is met when it is asked for, and a larger budget never gives a slower plan.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable, Iterable

from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program

_PROGRAMS = 64
"""Programs that are remembered; the least recently used one is forgotten first."""

_PLANS = 16
"""Plans of each program: the one with the lowest need and the latest ones."""

_known: collections.OrderedDict[Hashable, dict[Plan, int]] = collections.OrderedDict()
_lock = threading.Lock()


def key_of(program: Program, options: object) -> Hashable:
    """The key of a program together with the options by which it is planned and compiled."""
    return program.fingerprint, repr(options)


def proved(key: Hashable) -> list[tuple[Plan, int]]:
    """The compiled plans of `key`, with their needs in bytes."""
    with _lock:
        if key in _known:
            _known.move_to_end(key)
        return [*_known.get(key, {}).items()]


def keep(key: Hashable, plans: Iterable[tuple[Plan, int]]) -> None:
    """Remembers the needs of `plans`, in bytes."""
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
