"""beside: what is made again elementwise stands beside the backward pass that reads the same values.

The gradient to a weight reads the input of its layer. Where that is an activation, a plan often makes
it again from what it is made of, right before. The backward pass through the activation reads the
same values some steps later, and XLA:GPU makes one kernel of two elementwise passes that read one
array, unless one must wait for what the other leads to (`capture.siblings`). So both move:

    activation again                        gradient to the activation
    gradient to the weight                  activation again, and the pass through it: one kernel
    gradient to the activation        ->    gradient to the weight
    pass through the activation

That costs no step, and one kernel reads once what two read twice. Costs do not know it: a plan's
seconds are those of two kernels. The activation is there beside all that the other pass reads and
makes, so nothing moves near the peak.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from vmem_jax.core.costs import Costs
from vmem_jax.core.merging import Merging
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import Phase, Program, Step
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.core.spines import uses_of


@dataclasses.dataclass(frozen=True, slots=True)
class _Move:
    """The steps at `positions` of an order stand in front of the one at `to`."""

    positions: tuple[int, ...]
    to: int


def beside(program: Program, costs: Costs, timeline: Timeline) -> Timeline:
    """`timeline` with recomputed passes, and the gradients that read them, moved to the backward
    passes that read the same. Its peak is no higher, and it is no slower.
    """
    if not program.on_gpu:
        return timeline
    return _tried(program, costs, timeline, [*_moves(program, timeline)], ((), timeline))[1]


def _tried(
    program: Program,
    costs: Costs,
    timeline: Timeline,
    moves: Sequence[_Move],
    best: tuple[Sequence[_Move], Timeline],
) -> tuple[Sequence[_Move], Timeline]:
    """`best`, moves and what they make of `timeline`, with as many of `moves` as are found to do no
    harm beside them.

    All are tried at once; then each half of them.
    """
    if not moves:
        return best
    every = (*best[0], *moves)
    made = _moved(program, costs, timeline, every)
    if made is not None and made.peak <= timeline.peak and made.seconds <= timeline.seconds:
        return every, made
    if len(moves) == 1:
        return best
    half = len(moves) // 2
    best = _tried(program, costs, timeline, moves[:half], best)
    return _tried(program, costs, timeline, moves[half:], best)


def _moves(program: Program, timeline: Timeline) -> Iterator[_Move]:
    """What may move, in order; no step is in two moves."""
    resident = program.resident_nbytes
    most = resident + Merging.near * (timeline.peak - resident)
    order = _Order(program, timeline.order)
    ran: set[int] = set()
    taken: set[int] = set()
    for position, s in enumerate(timeline.order):
        if s in ran and (through := order.shared_by(position)) is not None:
            nbytes = order.largest(position)
            move = order.move(position, through)
            near = timeline.live_nbytes[through] + nbytes > most
            if not near and move is not None and taken.isdisjoint(move.positions):
                taken.update(move.positions)
                yield move
        ran.add(s)


class _Order:
    """An order of the steps of a program, and where each buffer is read and made."""

    def __init__(self, program: Program, steps: Sequence[int]) -> None:
        self.program, self.steps = program, steps
        self.uses = uses_of(program, steps)

    def at(self, position: int) -> Step:
        return self.program.steps[self.steps[position]]

    def largest(self, position: int) -> int:
        """Bytes of the largest buffer that the step at `position` makes."""
        return max(self.program.buffers[b].nbytes for b in self.at(position).writes)

    def shared_by(self, position: int) -> int | None:
        """The position of the next elementwise pass backwards that reads what the one forwards at
        `position` reads, but nothing that this makes; None where there is none."""
        step = self.at(position)
        if not step.fusible or step.phase is not Phase.FORWARD:
            return None
        nbytes = self.largest(position)
        shared = (b for b in step.reads if self.program.buffers[b].nbytes >= nbytes)
        readers = {p for b in shared for p, writes in self.uses[b] if p > position and not writes}
        makes = {*step.writes}
        return next(
            (
                p
                for p in sorted(readers)
                if self._goes_back(p, nbytes) and makes.isdisjoint(self.at(p).reads)
            ),
            None,
        )

    def move(self, position: int, through: int) -> _Move | None:
        """The pass at `position` and what reads it in front of the one at `through`, or as far
        towards that as others can wait for them; None where they cannot move."""
        readers = self._readers(position)
        if any(self.at(p).fusible for p in readers):  # one kernel with it where it is
            return None
        block = (position, *(p for p in readers if p < through))
        to = min({through, *(p for each in block[1:] for p in self._readers(each))})
        stands = block[-1] >= to or to - position == len(block)  # in front of it already
        return None if stands or not self._may_wait(block, to) else _Move(block, to)

    def _readers(self, position: int) -> list[int]:
        """Where what the step at `position` makes is read, until it is made again."""
        found: set[int] = set()
        for b in self.at(position).writes:
            later = self.uses[b][bisect.bisect_right(self.uses[b], (position, True)) :]
            found.update(p for p, _ in itertools.takewhile(lambda use: not use[1], later))
        return sorted(found)

    def _goes_back(self, position: int, nbytes: int) -> bool:
        """Whether an elementwise pass backwards, over values of `nbytes`, is at `position`."""
        step = self.at(position)
        makes = any(self.program.buffers[b].nbytes == nbytes for b in step.writes)
        return step.fusible and step.phase is Phase.BACKWARD and makes

    def _may_wait(self, block: Sequence[int], to: int) -> bool:
        """Whether nothing in front of position `to` writes over what the steps at `block` read."""
        between = {*self.steps[block[0] : to]}
        read = {b for p in block for b in self.at(p).reads}
        return not any(self.program.overwritten_by.get(b) in between for b in read)


def _moved(
    program: Program, costs: Costs, timeline: Timeline, moves: Sequence[_Move]
) -> Timeline | None:
    """`timeline` with `moves`; None where a value would be in host memory when it is read, or come
    back for nothing."""
    order = timeline.order
    waiting = {p for move in moves for p in move.positions}
    arrives: dict[int, list[int]] = {}
    for move in moves:
        arrives.setdefault(move.to, []).extend(move.positions)
    old: list[int] = []  # of each new position
    for position in range(len(order)):
        old += arrives.get(position, ())
        if position not in waiting:
            old.append(position)
    new = [0] * len(order) + [len(order)]
    for position, before in enumerate(old):
        new[before] = position
    transfers = tuple(
        dataclasses.replace(
            t, start=new[t.start], gone=new[t.gone], fetch=new[t.fetch], back=new[t.back]
        )
        for t in timeline.transfers
    )
    steps = tuple(order[p] for p in old)
    if not all(_is_there(program, steps, t) for t in transfers):
        return None
    return simulate(program, steps, costs, transfers)


def _is_there(program: Program, order: Sequence[int], t: Transfer) -> bool:
    """Whether a transfer's points are in order, no step reads its buffer while it is away, and one
    does when it is back, before the buffer is made again."""
    if not t.start <= t.gone <= t.fetch <= t.back:
        return False
    for position in range(t.gone, len(order)):
        step = program.steps[order[position]]
        if t.buffer in step.reads or t.buffer in step.writes:
            return position >= t.back and t.buffer in step.reads
    return True
