"""What the devices of a step have: total and free memory, in bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax

from vmem_jax.core.cards import hardware_of
from vmem_jax.errors import show_nbytes


def devices_of(avals: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Device]:
    """The devices that a step with these arguments runs on: the default one, if they name none."""
    used = {d for a in avals if a.sharding is not None for d in a.sharding.device_set}
    return sorted(used, key=lambda d: d.id) or [jax.devices()[0]]


def processors(avals: Sequence[jax.ShapeDtypeStruct], target: str | None = None) -> tuple[str, int]:
    """The compute capability, "9.0", and the streaming multiprocessors of the CUDA devices that the
    step runs on, or is compiled for; "" and 0 where it is on others."""
    if target is not None:
        hardware = hardware_of(target)
        if hardware is None:
            return "", 0
        return ".".join(map(str, hardware.compute_capability)), hardware.core_count
    device = devices_of(avals)[0]
    return str(getattr(device, "compute_capability", "")), getattr(device, "core_count", 0)


def total_nbytes(avals: Sequence[jax.ShapeDtypeStruct], target: str | None = None) -> int:
    """Bytes that the smallest device of the step may use in all."""
    if target is not None:
        from vmem_jax.devices.targets import target as card

        return card(target).memory_nbytes
    limits = []
    for device in devices_of(avals):
        stats = device.memory_stats() if device.platform != "cpu" else None
        limits.append(stats["bytes_limit"] if stats else _host_nbytes("SC_PHYS_PAGES"))
    return min(limits)


def free_nbytes(avals: Sequence[jax.ShapeDtypeStruct], target: str | None = None) -> int:
    """Bytes that are free now on the fullest device of the step."""
    if target is not None:
        return total_nbytes(avals, target)
    free = []
    for device in devices_of(avals):
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats:
            free.append(stats["bytes_limit"] - stats["bytes_in_use"])
        else:
            free.append(_host_nbytes("SC_AVPHYS_PAGES"))
    return min(free)


def limit_nbytes(
    budget: int | str | None,
    avals: Sequence[jax.ShapeDtypeStruct],
    own: int,
    target: str | None = None,
) -> int | None:
    """`budget` in bytes, None for no limit.

    Args:
      budget: bytes, or "device" for what is free.
      own: bytes that the arguments take of what is not free.

    Raises:
      ValueError: the device has less.
    """
    if budget is None:
        return None
    total = total_nbytes(avals, target)
    if isinstance(budget, str):
        return min(free_nbytes(avals, target) + own, total)
    if budget > total:
        raise ValueError(
            f"`budget` is {show_nbytes(budget)}, but the device has {show_nbytes(total)}. Use "
            "`budget='device'` for what is free, or a smaller one."
        )
    return budget


def _host_nbytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
