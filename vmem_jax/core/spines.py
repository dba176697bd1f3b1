"""spines: the running values at a position of an order, on which a barrier there hangs."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence

from vmem_jax.core.params import PARAMS
from vmem_jax.core.program import Program


def spines(
    program: Program, order: Sequence[int], avoid: Mapping[int, Collection[int]]
) -> dict[int, tuple[int, ...]]:
    """For each position the running values: the latest that is still read, and all read soon.

    All of them, because a barrier holds those steps alone that read a value of it: behind one of
    them may stand a weight gradient, which everything else overtakes. And the latest, because what a
    recomputation reads soon may be as old as the forward pass. The latest is the one that most steps
    lead up to, one after another. The newest by the order is not always it: a weight that is flipped
    for the backward pass is made just before it is read, but from an argument alone, so the compiler
    may make it at any time, and with it what hangs on it.

    Args:
      avoid: position -> buffers that cannot be among them.
    """
    uses = uses_of(program, order)
    depth: dict[int, tuple[int, int]] = {}  # temporary buffer -> (steps up to it, position)
    ran: set[int] = set()
    deepest = 0
    found: dict[int, tuple[int, ...]] = {}
    for position, s in enumerate(order):
        step = program.steps[s]
        if position in avoid:
            # what is made anew before it is read may be dead now
            live = lambda b, position=position: (
                b in depth and b not in avoid[position] and is_read_from(uses[b], position)
            )
            latest = max(filter(live, depth), key=lambda b: (depth[b], b), default=None)
            soon = order[position : position + PARAMS.spine_steps]
            read = [b for later in soon for b in program.steps[later].reads if live(b)]
            found[position] = tuple(dict.fromkeys([*([] if latest is None else [latest]), *read]))
        # what runs again reads fenced values, and so comes after all that came before
        here = deepest if s in ran else 0
        here = 1 + max([here, *(depth[b][0] for b in step.reads if b in depth)])
        deepest = max(deepest, here)
        ran.add(s)
        for b in step.writes:
            if not program.is_resident[b]:
                depth[b] = here, position
    return found


def uses_of(program: Program, order: Sequence[int]) -> dict[int, list[tuple[int, bool]]]:
    """Buffer -> its uses in `order` as (position, whether it is a write), inputs included."""
    found: dict[int, list[tuple[int, bool]]] = {}
    for position, s in enumerate(order):
        for b in program.steps[s].reads:
            found.setdefault(b, []).append((position, False))
        for b in program.steps[s].writes:
            found.setdefault(b, []).append((position, True))
    return found


def is_read_from(uses: Sequence[tuple[int, bool]], position: int) -> bool:
    """Whether the version that is there at `position` is read at or after it."""
    i = bisect.bisect_left(uses, (position, False))
    return i < len(uses) and not uses[i][1]
