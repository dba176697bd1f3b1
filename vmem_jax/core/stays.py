"""stays: when each value is on the device, by the events of a schedule, for reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from vmem_jax.core.liveness import taken_over
from vmem_jax.core.program import Program
from vmem_jax.core.schedule import Do, Event, actions
from vmem_jax.core.simulate import Timeline

WORKSPACE = "workspace"
"""The key in `live_by_kind` of bytes that belong to no buffer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stay:
    """A buffer is on the device while the steps at the positions `first` to `last` run, both
    included."""

    buffer: int
    first: int
    last: int


def stays(program: Program, events: Iterable[Event]) -> list[Stay]:
    """The stays of all buffers but the residents, in the order in which they end. What is recomputed
    or moved has several, a hosted buffer one."""
    hosted, since, found = {*program.hosted}, dict[int, int](), list[Stay]()
    comes = [b in hosted or not resident for b, resident in enumerate(program.is_resident)]

    def end(b: int, last: int) -> None:
        first = since.pop(b)
        if first <= last:  # else it comes and leaves before the same step
            found.append(Stay(b, first, last))

    for event in events:
        if event.do is Do.RUN:
            step = program.steps[event.index]
            for b in (*step.reads, *step.writes):
                if comes[b]:
                    since.setdefault(b, event.position)
        elif event.do is Do.FETCH:
            since[event.buffers[0]] = event.position
        elif event.do is Do.GONE and event.buffers[0] not in hosted:
            end(event.buffers[0], event.position - 1)
        elif event.do is Do.FREE:
            for b in event.buffers:
                end(b, event.position)
    return found


def live_during(program: Program, timeline: Timeline, position: int) -> list[int]:
    """The buffers that are on the device while the step at `position` runs, without the residents."""
    every = stays(program, actions(program, timeline.order, timeline.transfers))
    return sorted(each.buffer for each in every if each.first <= position <= each.last)


def live_by_kind(program: Program, timeline: Timeline) -> list[dict[str, int]]:
    """`live_by` the kind of each buffer."""
    return live_by(program, timeline, lambda b: program.buffers[b].kind.value)


def live_by(program: Program, timeline: Timeline, of: Callable[[int], str]) -> list[dict[str, int]]:
    """For each position of the order the live bytes by what `of` says of a buffer; their sum is
    `live_nbytes` there.

    Arguments and outputs count throughout, but for hosted ones. What takes over the memory of another
    value, a donated argument's or a dying read's, counts as that one.
    """
    steps, buffers, hosted = program.steps, program.buffers, {*program.hosted}
    names = [*map(of, range(len(buffers)))]
    now: dict[str, int] = {}

    def add(b: int, sign: int = 1) -> None:
        name = names[b]
        now[name] = now.get(name, 0) + sign * buffers[b].nbytes

    inputs, outputs = {*program.inputs} - hosted, {*program.outputs} - hosted
    for b in inputs | outputs:
        add(b)
    for b in outputs & inputs:
        if (b, b) not in program.aliases:
            add(b)  # handed back without donation: copied into a buffer of its own
    for i, o in program.aliases:
        if i != o:
            add(o, -1)
    events = [*actions(program, timeline.order, timeline.transfers)]
    changes: list[list[tuple[int, int]]] = [[] for _ in range(len(timeline.order) + 1)]
    for stay in stays(program, events):
        changes[stay.first].append((stay.buffer, 1))
        changes[stay.last + 1].append((stay.buffer, -1))
    history = []
    for event in events:
        if event.do is not Do.RUN:
            continue
        for change in changes[event.position]:
            add(*change)
        during, step = dict(now), steps[event.index]
        for w in taken_over(program, step, event.buffers).values():
            during[names[w]] -= buffers[w].nbytes
        if step.workspace:
            during[WORKSPACE] = step.workspace
        history.append(during)
    return history
