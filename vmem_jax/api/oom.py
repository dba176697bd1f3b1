"""oom: what to do after XLA ran out of device memory, in a few lines; what a planned step lacks."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import jax

from vmem_jax.core.need import need_nbytes
from vmem_jax.devices.device import total_nbytes
from vmem_jax.errors import show_nbytes
from vmem_jax.transfer import host_memory

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
    if error is not None and not lacks_memory(error):
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


def needed(name: str, compiled: Any, arrays: Sequence[jax.Array]) -> str:
    """What a step that found too little memory needs, what is there now, and what to do.

    The step fitted when it was planned. Since then other arrays, or another process, took memory.

    Args:
      name: of the step.
      compiled: the compiled step that ran.
      arrays: its arguments.
    """
    device = next((d for x in arrays for d in x.sharding.device_set), jax.devices()[0])
    stats = device.memory_stats() if device.platform != "cpu" else None
    need = need_nbytes(compiled)
    more = need - compiled.memory_analysis().argument_size_in_bytes
    if stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        there = f"{show_nbytes(free)} of XLA's {show_nbytes(stats['bytes_limit'])} are not in use"
        who = "other arrays of this process hold" if more > free else "another process holds"
    else:
        limits = *host_memory.limits(lock_pages=False), *host_memory.address_space()
        limit = min(limits, key=lambda limit: limit.nbytes)
        there, who = f"{show_nbytes(limit.nbytes)} are left by {limit.name}", "something else holds"
    return (
        f"`{name}` was planned to need {show_nbytes(need)}, of which its arguments are there. Now "
        f"{there}: {who} what is missing. The step did not run. Free that memory and call it again, "
        'or plan for what is left with `budget="device"`.'
    )


def lacks_memory(error: BaseException) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "ut of memory" in str(error)
