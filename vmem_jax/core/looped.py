"""looped: stacks that leave the device slice by slice in the loop that makes them, and return in the
loop that reads them.

Only the slices in flight of such a stack are on the device. So a Program with looped stacks is again
a Program, with smaller buffers and with loops that take at least as long as the link needs. Policies,
`simulate` and `validate` see nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Buffer, Program

IN_FLIGHT = 2
"""Slices on the device: the one that is made or read, and the one being copied."""

EXTRA = 1
"""Slices over the link beside those of the stack: the backward loop fetches one iteration ahead, and
in its last iteration it fetches an empty one that the forward loop has parked first."""

_ENDS = 2
"""Starts of a copy that an iteration takes beside those of its slices: on an H200 (`slices.py`)
iterations of slices of 1 to 8 MiB take 16 to 43 µs longer than these take on the link."""

_LEAST = 5
"""Starts of a copy that such an iteration takes at the least: with one, two or four slices of 128 KiB
in it, 50 µs on an H200."""


def stacks(program: Program) -> tuple[int, ...]:
    """The buffers that can be looped."""
    return tuple(
        b
        for b, buffer in enumerate(program.buffers)
        if buffer.slices > IN_FLIGHT and buffer.movable and not program.is_resident[b]
    )


def slices_nbytes(buffer: Buffer) -> int:
    """Bytes over the link, in each direction, for a looped stack."""
    return buffer.nbytes // buffer.slices * (buffer.slices + EXTRA)


def with_looped(program: Program, looped: Collection[int]) -> Program:
    """`program` with the stacks of `looped` moved slice by slice."""
    if not looped:
        return program
    buffers = list(program.buffers)
    steps = list(program.steps)
    for b in looped:
        slice_nbytes = buffers[b].nbytes // buffers[b].slices
        buffers[b] = dataclasses.replace(buffers[b], nbytes=IN_FLIGHT * slice_nbytes, movable=False)
        for s in _loops(program, b):
            steps[s] = dataclasses.replace(steps[s], pure=False)  # it pushes or pops
        writer = program.producer[b]
        # the slice that an iteration makes is one of those in flight
        workspace = max(steps[writer].workspace - slice_nbytes, 0)
        steps[writer] = dataclasses.replace(steps[writer], workspace=workspace)
    return dataclasses.replace(program, buffers=tuple(buffers), steps=tuple(steps))


def costs_with_looped(program: Program, looped: Collection[int], costs: Costs) -> Costs:
    """The costs of `with_looped`: a loop takes at least as long as its slices take on the link.

    A slice takes as long as the host needs to start its copy, at least; and an iteration ends when
    its last slice has been started and has arrived, `_ENDS` starts later, but not before `_LEAST`.
    """
    if not looped:
        return costs
    if costs.link is None:
        raise ValueError("there are looped stacks, but these costs have no link")
    link, on_link = costs.link, [0.0] * len(program.steps)
    starts: dict[int, float] = {}
    for b in looped:
        buffer = program.buffers[b]
        count, once = buffer.slices + EXTRA, buffer.nbytes // buffer.slices
        for s, rate in zip(_loops(program, b), (link.out, link.into), strict=True):
            on_link[s] += count * max(once / rate, link.slice_start)
            starts[s] = count * link.slice_start
    for s, start in starts.items():
        on_link[s] = max(on_link[s] + _ENDS * start, _LEAST * start)
    seconds = tuple(map(max, costs.seconds, on_link))
    return dataclasses.replace(costs, seconds=seconds)


def _loops(program: Program, b: int) -> tuple[int, int]:
    """The loop that makes stack `b`, and the one that reads it."""
    [reader] = program.readers[b]
    return program.producer[b], reader
