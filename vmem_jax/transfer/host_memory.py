"""How much host memory may be pinned here, and what says so: read before anything is pinned.

Pinning more than there is does not fail; it stalls the machine, or has the kernel end the process.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vmem_jax.errors import HostMemoryError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_STATM = Path("/proc/self/statm")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """At most `nbytes` more bytes, because of `name`."""

    nbytes: int
    name: str


def check(
    nbytes: int,
    *,
    lock_pages: bool,
    host_budget: int | None = None,
    others: Sequence[Limit] = (),
) -> None:
    """Checks that `nbytes` more bytes of host memory can be pinned, by `limits` and by `others`.

    Raises:
      HostMemoryError: they cannot; it names the tightest limit.
    """
    known = (*limits(lock_pages=lock_pages, host_budget=host_budget), *others)
    limit = min(known, key=lambda x: x.nbytes)
    if nbytes > limit.nbytes:
        raise HostMemoryError(nbytes=nbytes, limit_nbytes=limit.nbytes, limit=limit.name)


def limits(*, lock_pages: bool, host_budget: int | None = None) -> tuple[Limit, ...]:
    """Every limit on host memory that applies here.

    Args:
      lock_pages: whether RLIMIT_MEMLOCK counts. It does for `mlock`, not for CUDA's driver, which
        pins pages of its own; Linux sets it to a few MiB, so heeding it would refuse what works.
      host_budget: what the user allows, in bytes.
    """
    found = [*_machine(), *_cgroup()]
    if lock_pages:
        found += _memlock()
    if host_budget is not None:
        found.append(Limit(host_budget, "`host_budget`"))
    return tuple(found) or (Limit(_UNLIMITED, "nothing that is known here"),)


def _machine() -> Iterator[Limit]:
    for line in _lines(_MEMINFO):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield Limit(int(value.split()[0]) * 1024, "the machine's available memory")


def address_space() -> Iterator[Limit]:
    """The limit on all memory of this process, where there is one. `limits` has it not: the system
    refuses what is beyond it, at once."""
    soft, pages = _soft("RLIMIT_AS"), _lines(_STATM)
    if soft is not None and pages:
        used = int(pages[0].split()[0]) * os.sysconf("SC_PAGE_SIZE")
        yield Limit(max(soft - used, 0), "RLIMIT_AS (`ulimit -v`)")


def _memlock() -> Iterator[Limit]:
    soft = _soft("RLIMIT_MEMLOCK")
    if soft is not None:
        yield Limit(soft, "RLIMIT_MEMLOCK (`ulimit -l`)")


def _soft(name: str) -> int | None:
    """The soft limit of the resource `name`; None where there is none."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup() -> Iterator[Limit]:
    """The limits of this process's control group and of all groups around it, v2 and v1."""
    for line in _lines(_OWN_CGROUP):
        number, controllers, path = line.split(":", 2)
        if number == "0":  # v2
            yield from _around(_CGROUP_ROOT, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _around(
                _CGROUP_ROOT / "memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _around(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[Limit]:
    group = root / path.strip("/")
    for each in (group, *group.parents):
        if each != root and root not in each.parents:
            return
        allowed, used = _number(each / limit), _number(each / usage)
        if allowed is None or used is None or allowed >= _UNLIMITED:
            continue
        cache = 0  # file pages that the kernel gives back when asked
        for line in _lines(each / "memory.stat"):
            name, _, value = line.partition(" ")
            if name == reclaimable:
                cache = int(value)
        yield Limit(max(allowed - used + cache, 0), f"the memory limit of cgroup {each}")


def _number(path: Path) -> int | None:
    for line in _lines(path):
        return int(line) if line.strip().isdigit() else None
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
