"""timings: the times of convolutions on a GPU, from the database or measured now."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax

from vmem_jax.conv import cudnn
from vmem_jax.conv.profiler import SECONDS, Profile, profile
from vmem_jax.core.convolution import Convolution, Micro
from vmem_jax.policy.workspace_reuse import BatchSizes

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
    """Times on `device` what its database lacks of `convolutions`, and keeps it there.

    Args:
      sizes: of micro-batches.
      deadline: seconds after which no further timing begins.

    Raises:
      ImportError: as `known`.
    """
    library, database = cudnn.Cudnn(device), cudnn.database(device)
    return profile(convolutions, sizes, library, database, deadline=deadline)
