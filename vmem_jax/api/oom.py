"""oom: what to do after XLA ran out of device memory, in a few lines."""

from __future__ import annotations

import re
import sys

import jax

from vmem_jax.devices.device import total_nbytes
from vmem_jax.errors import show_nbytes

_ASKED = re.compile(
    r"(?:allocate|allocating)\s+(?:about\s+)?([\d.]+)\s*([KMGT]i?B|bytes|B)?", re.IGNORECASE
)


def explain_oom(error: BaseException | None = None) -> str:
    """What to do after `RESOURCE_EXHAUSTED`, in five lines; print it.

    Args:
      error: what JAX raised; by default the last uncaught exception of an interactive session.

    Returns:
      What was asked for, the bytes of live arrays and of the device, and three steps to take.
    """
    error = error if error is not None else getattr(sys, "last_value", None)
    message = "" if error is None else str(error)
    if error is not None and "RESOURCE_EXHAUSTED" not in message and "ut of memory" not in message:
        return f"This is no lack of device memory: {type(error).__name__}: {message[:200]}"
    device = jax.local_devices()[0]
    asked = _ASKED.search(message)
    what = f"XLA asked for {' '.join(filter(None, asked.groups()))}" if asked else "XLA ran out"
    here = [
        shard.data.nbytes
        for array in jax.live_arrays(device.platform)
        for shard in array.addressable_shards
        if shard.device == device and not array.is_deleted()
    ]
    live, total = show_nbytes(sum(here)), show_nbytes(total_nbytes(()))
    lines = [
        f"{what}; arrays that your program holds take {live} of the {total} of {device}.",
        '1. Write vmem_jax.jit(train_step, budget="device", donate_argnums=...) in place of jax.jit.',
        "2. Donate the parameters and the optimiser state, and delete arrays that you need no more.",
        "3. Call the step. It runs, or a BudgetError names the lowest peak, its layer, what helps.",
        "More: docs/out-of-memory.md. Where the memory goes: step.report(*args).",
    ]
    return "\n".join(lines)
