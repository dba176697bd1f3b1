"""drop_order: the order of a program that recomputes dropped values, without a limit of bytes.

Without a limit nothing but the drops themselves is missing at any time. So the executor's order
(`policy.executor`) is the base order with one burst of recomputation before each step that reads a
dropped value, and only these steps are looked at. A search asks for hundreds of such orders.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vmem_jax.policy.recomputation import Drop, Recomputation


def order_with_drops(recomputation: Recomputation, drops: Collection[Drop]) -> tuple[int, ...]:
    """The order that `Execution` makes of the base with `drops` alone.

    Args:
      drops: pairs (buffer, use after which it is freed); those that may not be dropped are kept.
    """
    base, uses = recomputation.base, recomputation.uses
    program = recomputation.program
    events = []  # (position, whether the buffer is freed behind it or read at it, buffer)
    for b, n in drops:
        if program.is_resident[b] or n + 1 >= len(uses[b]):
            continue
        if recomputation.may_drop(b, uses[b][n + 1]):
            events += [(uses[b][n], True, b), (uses[b][n + 1], False, b)]
    order: list[int] = []
    absent: set[int] = set()
    done = 0
    for position, is_freed, b in sorted(events):
        if is_freed:
            absent.add(b)
        elif b in absent:
            order += base[done:position]
            done = position
            wanted = [r for r in program.steps[base[position]].reads if r in absent]
            order += _burst(recomputation, wanted, position, absent)
    return (*order, *base[done:])


def _burst(
    recomputation: Recomputation, wanted: Sequence[int], position: int, absent: set[int]
) -> list[int]:
    """The steps that make `wanted` before `position` from what is there, inputs first; of `absent`
    what they make is there afterwards."""
    program, uses, pinned = recomputation.program, recomputation.uses, recomputation.pinned
    resident, producer = program.is_resident, program.producer
    steps: set[int] = set()
    stack = [*wanted]
    while stack:
        s = producer[stack.pop()]
        if s in steps:
            continue
        steps.add(s)
        for r in program.steps[s].reads:
            there = resident[r] or producer[r] < 0 or r in pinned
            if not there and (r in absent or uses[r][-1] < position):
                stack.append(r)
    for s in steps:
        absent.difference_update(program.steps[s].writes)
    return sorted(steps)
