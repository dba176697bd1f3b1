"""cache: what is left of the budget becomes the tensor cache of a step that moves values."""

from __future__ import annotations

import dataclasses

from vmem_jax.api.entry import CompiledStep
from vmem_jax.core.tensor_cache import events_of, traffic
from vmem_jax.transfer.executable import Moving


def with_cache(entry: CompiledStep, wanted: bool) -> CompiledStep:
    """`entry`, whose step has what its budget leaves as its tensor cache.

    The cache is no larger than what is parked at once, and is left out where it saves nothing, where
    the transport has no arena, or without a budget.

    Args:
      wanted: whether the chosen policy has a cache.
    """
    best = entry.best
    step, limit = best.compiled, entry.budget if entry.budget is not None else best.plan.budget
    arena = step.arena if isinstance(step, Moving) else None
    if not wanted or arena is None or limit is None:
        return entry
    program, layout = entry.traced.captured.program, arena.layout
    events = [*events_of(program, best.plan)]
    uncached = traffic(events, layout.slots, 0)
    cached = traffic(events, layout.slots, max(min(limit - best.need, layout.nbytes), 0))
    if cached.out + cached.into >= uncached.out + uncached.into:
        return entry
    step.cache_nbytes = cached.capacity
    return dataclasses.replace(entry, cache=(uncached, cached))
