"""filters: where XLA keeps those of convolutions, in the layout in which the library takes them.

The convolution that reads a filter and the one backwards, which reads it reversed, take the same
transposed copy, and so does the update: XLA makes one for all of them. From then on nothing reads
the filter itself. Where it is donated its memory is given away, until the new filter is transposed
into it at the end of the step: to the copies of other filters, and to whatever is no larger.

A filter of one element in space is read itself backwards, where it is what it is forwards but for
its channels. And of a filter as large as what it makes XLA takes the gradient for a convolution
forwards, to which it adds the filter itself. The update reads the filter itself, too, where the
gradient is stated to be row-major (`core.stated_layouts`). Then XLA may make the copy in front of
the first kernel that makes memory grow by as much: list scheduling does, other orders that it tries
do not, and it takes the one with the lowest peak. In sub-batches the filters and their copies are
kept for all of them: XLA moves what does not change out of the loop.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from vmem_jax.core.packing import Interval
from vmem_jax.core.program import Phase, Program
from vmem_jax.core.schedule import Do, Event
from vmem_jax.core.stated_layouts import updated_as_they_are


@dataclasses.dataclass(frozen=True)
class Filter:
    """A filter that is kept transposed.

    Attributes:
      reversed: the buffers of the reversed filter, which are the same copy.
      copy: from where to where the copy is there.
      slot: from where to where its own memory is free; None where it never is.
    """

    reversed: tuple[int, ...]
    copy: Interval
    slot: Interval | None


def transposed_filters(
    program: Program, order: Sequence[int], as_run: bool = False, early: Sequence[Event] = ()
) -> list[Filter]:
    """The filters that the steps of `order` read forwards and then reversed.

    Args:
      as_run: whether the updates stand where XLA runs them; else it may do so at the end.
      early: the events of `order`, for copies that list scheduling makes; by default each is made
        where it is read first.
    """
    first: dict[int, int] = {}  # position of the first convolution that reads it
    last: dict[int, int] = {}
    reversed_: dict[int, tuple[int, ...]] = {}  # by the filter
    themselves = {*updated_as_they_are(program)}  # that their updates read
    flat: set[int] = set()
    for position, s in enumerate(order):
        step = program.steps[s]
        last |= dict.fromkeys(step.reads, position)
        if step.op == "conv_general_dilated":
            for b in step.reads:
                first.setdefault(b, position)
            if (convolution := step.convolution) is not None:
                themselves.update(step.reads if convolution.is_ambiguous else ())
                flat.update(() if convolution.is_spatial else step.reads)
        elif step.op == "rev" and len(step.reads) == len(step.writes) == 1:
            [r], [w] = step.reads, step.writes
            reversed_[r] = tuple(dict.fromkeys((*reversed_.get(r, ()), w)))
    found, end = [], len(order) - 1
    loop = [position for position, s in enumerate(order) if program.steps[s].is_boundary]
    growth = () if loop else _growth(program, early)
    for r, copies in reversed_.items():
        backwards = max(last.get(w, 0) for w in copies)
        since, until, slot = first.get(r, end), backwards, None
        if since >= until:
            continue
        nbytes = program.buffers[r].nbytes
        if loop and loop[0] < since < loop[1]:
            since, until = loop
        elif r not in themselves:  # the update reads the copy
            until = max(until, last[r])
            while as_run and until < end and program.steps[order[until + 1]].phase is Phase.UPDATE:
                until += 1  # what is updated is transposed behind all updates that can run
            unread = (backwards if r in flat else since) + 1
            if r in program.overwritten_by and unread <= end:
                until = max(until, unread) if as_run else end
                slot = Interval(nbytes, unread, until)
        elif r in flat:
            until = since
        if slot is None and growth:  # in slots one copy lies where another filter was
            since = min(since, bisect.bisect_left(growth, nbytes))
        found.append(Filter(copies, Interval(nbytes, since, until), slot))
    return found


def _growth(program: Program, events: Sequence[Event]) -> Sequence[int]:
    """For each position the most bytes by which a step makes memory grow up to it."""
    size = lambda b: 0 if program.is_resident[b] else program.buffers[b].nbytes
    runs = ((program.steps[e.index].writes, e.buffers) for e in events if e.do is Do.RUN)
    grown = (sum(map(size, made)) - sum(map(size, freed)) for made, freed in runs)
    return [*itertools.accumulate(grown, max)]
