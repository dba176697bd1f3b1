"""timings: the times of convolutions on a GPU, from the database or measured now."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax

from vmem_jax.conv import cudnn
from vmem_jax.conv.profiler import SECONDS, Profile, profile
from vmem_jax.core.convolution import Convolution, Micro
from vmem_jax.policy.workspace_reuse import BatchSizes
from vmem_jax.profile.store import cores

Known = Callable[[Convolution], list[Micro]]
"""The micro-configurations of a convolution: calls for its batch or for a part of it."""


def known(device: jax.Device) -> Known:
    """What the database of `device` has.

    Raises:
      ImportError: there is no cuDNN, or the extension was built without it.
    """
    entries = cudnn.database(device).load()
    parts: dict[Convolution, list[Micro]] = {}
    for convolution, entry in entries.items():
        parts.setdefault(convolution.with_batch(0), []).extend(entry.timed)
    return lambda c: [m for m in parts.get(c.with_batch(0), []) if m.batch <= c.batch]


def profile_on(
    device: jax.Device,
    convolutions: Iterable[Convolution],
    sizes: BatchSizes = BatchSizes.POWER_OF_TWO,
    deadline: float = SECONDS,
) -> Profile:
    """Times what the database of `device` lacks of `convolutions` on all that are `like` it.

    Args:
      sizes: of micro-batches.
      deadline: seconds after which no further timing begins.

    Raises:
      ImportError: as `known`.
    """
    here, *others = map(cudnn.Cudnn, like(device))
    database = cudnn.database(device)
    return profile(convolutions, sizes, here, database, more=others, deadline=deadline)


def like(device: jax.Device) -> list[jax.Device]:
    """`device`, and the others of this process that are of its kind, one for each core at most.

    Another kind has other times, and a file of its own. Timing takes a core for each device: a kernel
    that is launched late would count as a slow one.
    """
    others = [
        d
        for d in jax.local_devices(backend=device.platform)
        if d.device_kind == device.device_kind and d.id != device.id
    ]
    return [device, *others][: cores()]
