"""fences: where XLA must be held to the order of a plan, and by which values.

XLA schedules by data dependence and undoes what is not fenced. A fence is one barrier over values
and the *spine*, the running cotangent: nothing that reads the fenced values can start before the
spine is there, and nothing that reads the spine can start before the fenced values are. The order is
cut into *runs*, from one spine to the next, and one fence stands at the start of a run, for all of
it: one barrier cuts fewer fusions than one for each value. Behind it stand

- what the run reads from before: kept residuals, and every input of what it recomputes. Without it
  the compiler merges the copy with the original and keeps what it likes. So is a cotangent of long
  before that a heavy step reads alone, as each layer does that of a sum over all layers: XLA may run
  all of these at once;
- what nothing needs soon of what the last run made or could free: a weight gradient, so that it is
  computed there, where its inputs die, and not at the end.

Where a recomputation could start sooner in its run than the plan has it, and take the memory that is
not free there yet, a run of its own starts with it: what it reads waits for the spine again. So it
is where XLA would merge two recomputed steps and keep what the first one frees (`merging`): a run
starts behind the first, with its result as the spine. Before a loop one starts, too, if a product of
its run frees what is large: XLA would run it behind the loop.

The forward pass is one run. What it makes for the backward pass alone, a mask, is tied to what its
next heavy step reads, where its own input would otherwise wait for the backward pass with it. A step
that takes a large workspace and waits for nothing large, such as the random bits of dropout on a CPU,
is tied to what the heavy step before it made. So is what XLA:GPU would make at the start, since it
waits for nothing: casts of weights, and zeros that a loop or a scatter adds to (`early`).

An update waits for the other readers of what it writes over (`overwriting`).

A step without a backward pass has no running cotangent, and XLA would start all of its independent
branches at once. So a run begins at each heavy step that reads nothing which was made
since the last run began, and it waits for what the run before leaves.

Only values that exist in memory are fenced, so no other fence breaks a fusion that XLA could make.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from vmem_jax.core.costs import Costs
from vmem_jax.core.early import held_back
from vmem_jax.core.merging import Merging
from vmem_jax.core.overwriting import readers_before_updates
from vmem_jax.core.program import BEGIN, Phase, Program
from vmem_jax.core.runs import anew, before_loops, forward_end, late, too_early
from vmem_jax.core.simulate import simulate
from vmem_jax.core.spines import is_read_from, uses_of


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """A barrier before the step at `position`, over `buffers`; the first is the spine, if any."""

    position: int
    buffers: tuple[int, ...]


def fences(
    program: Program,
    order: Sequence[int],
    small: int | None = None,
    body: bool = False,
    early: bool = False,
) -> tuple[Fence, ...]:
    """The fences that hold XLA to `order`.

    Args:
      body: `program` is the body of a loop.
      early: whether XLA makes what is made of arguments or of nothing as soon as it can.
      small: values up to this many bytes are not worth a fence, except as inputs of a recomputation
        (default: a 2,000th of all temporaries, as long as those below it are a fifth at most).
    """
    return _Fencer(program, order, _small(program) if small is None else small, body, early).all()


def _small(program: Program) -> int:
    resident = program.is_resident
    sizes = sorted(b.nbytes for b, held in zip(program.buffers, resident, strict=True) if not held)
    total = sum(sizes)
    # in a network of very many layers each is small, and all together are nearly everything
    until = zip(sizes, itertools.accumulate(sizes), strict=True)
    most = next((nbytes - 1 for nbytes, together in until if 5 * together > total), 0)
    return min(total // 2000, most)


class _Fencer:
    def __init__(
        self, program: Program, order: Sequence[int], small: int, body: bool, early: bool
    ) -> None:
        self.program, self.order, self.small, self.body = program, order, small, body
        self.early = early
        self.sends = any(step.sent for step in program.steps)
        seen: set[int] = set()
        self.again = []  # for each position: whether its step ran before
        for s in order:
            self.again.append(s in seen)
            seen.add(s)
        self.late = late(program, order) if body else [False] * len(order)
        goes_back = any(step.phase is Phase.BACKWARD for step in program.steps)
        self.anew = () if body or goes_back else tuple(anew(program, order))
        for position in self.anew:
            self.late[position] = True
        self.recomputed = {s for s, again in zip(order, self.again, strict=True) if again}
        self.uses = uses_of(program, order)
        self.forward_end = forward_end(program, order, small)
        self.held: frozenset[int] = frozenset()  # positions that wait for the run before
        self.loops: frozenset[int] = frozenset()  # positions of `before_loops`
        self.joins: dict[int, int] = {}  # of those behind a step of a merged kernel, its result

    def _is_read_from(self, b: int, position: int) -> bool:
        return is_read_from(self.uses[b], position)

    def all(self) -> tuple[Fence, ...]:
        program, order = self.program, self.order
        starts = self._runs()
        found: list[Fence] = []
        made_in: dict[int, int] = {b: -1 for b in program.inputs}  # run of a buffer's version
        phase_of: dict[int, Phase] = {}
        fenced_in: dict[int, int] = {}
        ran_in: dict[int, int] = {}  # step -> the run in which it last ran
        loose: list[int] = []  # made in the last run, not needed on the spine
        owed: list[int] = []  # positions of weight gradients whose inputs are there for longer
        for run, start in enumerate(starts):
            end = starts[run + 1] if run + 1 < len(starts) else len(order)
            spine = self.joins.get(start, self._spine(start))
            spine = None if spine is None else self._beside(spine, start, end)
            wanted: dict[int, None] = {}
            fresh: set[int] = set()
            for position in range(start, end):
                step = program.steps[order[position]]
                for b in step.reads:
                    if b in fresh or b in wanted or (b == spine and not self.again[position]):
                        continue
                    until = len(order) if self.body else position + 1
                    if self._is_written_over(b, position, until):
                        continue
                    if self._needs_fence(position, b, run, made_in, phase_of, fenced_in, ran_in):
                        wanted[b] = None
                if position in self.loops:  # XLA makes its stacks behind what it reads first
                    wanted.update((b, None) for b in step.reads if program.producer[b] >= 0)
                fresh.update(step.writes)
            # without a spine a fence still keeps a copy and its original apart
            ties = [b for b in loose if b not in wanted and b != spine]
            if spine is None and start not in self.anew:
                ties = []
            waiting = loose if self.body and spine is None else []
            if self.body:
                ties = [b for b in ties if not self._is_written_over(b, start, len(order))]
            if self.body and spine is None and wanted:
                spine = self._spine(start, carried_on=False)
            if run > 0 and (ties or wanted):
                held = [] if spine is None else [spine]
                held += [b for b in (*ties, *wanted) if b != spine]
                found.append(Fence(start, tuple(held)))
                fenced_in.update(dict.fromkeys((*wanted, *held), run))
            for position in range(start, end):
                step = program.steps[order[position]]
                ran_in[order[position]] = run
                for b in step.writes:
                    made_in[b] = run
                    phase_of[b] = step.phase
                    fenced_in.pop(b, None)
            owed += range(start, end)
            loose = [*(b for b in waiting if self._outlives(b, end)), *self._loose(owed, end)]
            owed = [position for position in owed if self._is_owed(position, end)]
        is_whole = self.anew or len(starts) == 1
        found += self._forward_ties(len(order) if is_whole else self.forward_end)
        return self._before_updates(sorted(found, key=lambda fence: fence.position))

    def _before_updates(self, fences: Sequence[Fence]) -> tuple[Fence, ...]:
        """`fences`, with those that hold updates behind the other readers of what they write over
        and those of `early`."""
        if self.body:
            return tuple(fences)
        held = {fence.position: fence.buffers for fence in fences}
        parts = self.program, self.order, self.uses, held, self.small
        waiting = (*parts[:3], self.small, self.forward_end, self._is_written_over)
        late = held_back(*waiting) if self.early else ()
        for position, more in (*readers_before_updates(*parts), *late):
            held[position] = tuple(dict.fromkeys((*held.get(position, ()), *more)))
        return tuple(Fence(position, held[position]) for position in sorted(held))

    def _runs(self) -> list[int]:
        """Positions at which runs start: after each backward step that makes a new spine."""
        starts = [0]
        backward = False
        for position, s in enumerate(self.order):
            step = self.program.steps[s]
            if step.phase is Phase.BACKWARD and not backward:
                backward = True
                if position > 0:
                    starts.append(position)
            makes_spine = (
                (backward or self.again[position])
                and step.is_heavy
                and step.phase is Phase.BACKWARD
                and any(self._can_be_spine(b) for b in step.writes)
            )
            if makes_spine and position + 1 < len(self.order):
                starts.append(position + 1)
        if not self.body:
            self.loops = frozenset(before_loops(self.program, self.order, starts, self._frees))
            starts = sorted({*starts, *self.loops})
        # recomputation before the first backward step: each burst is a run of its own
        bursts = [p for p in range(1, len(self.order)) if self.again[p] and not self.again[p - 1]]
        first_backward = starts[1] if len(starts) > 1 else len(self.order)
        starts = sorted({*starts, *(p for p in bursts if p < first_backward), *self.anew})
        # a step that is repeated within a run begins a new one, so that its inputs can be renewed
        split, here = set(starts), set[int]()
        for position, s in enumerate(self.order):
            if position in split:
                here = set()
            if s in here:
                split.add(position)
                here = set()
            here.add(s)
        timeline = simulate(self.program, self.order, Costs("", (0.0,) * len(self.program.steps)))
        parts = self.program, timeline, self.again, self.uses, self.small
        self.joins = Merging(*parts).held(sorted(split))
        split |= self.joins.keys()
        waiting = too_early(
            self.program, self.order, sorted(split), timeline, self.again, self.small
        )
        self.held = frozenset({*self.joins, *waiting})
        return sorted(split | self.held)

    def _can_be_spine(self, b: int) -> bool:
        """Large, temporary, and read later by the backward pass; in the body of a loop by the updates
        behind it as well, so that what follows a weight gradient waits for it."""
        program = self.program
        if program.is_resident[b] or program.buffers[b].nbytes <= self.small:
            return False
        until = (Phase.BACKWARD, Phase.UPDATE) if self.body else (Phase.BACKWARD,)
        return any(program.steps[r].phase in until for r in program.readers[b])

    def _spine(self, start: int, carried_on: bool = True) -> int | None:
        """The value made last before `start` that a heavy step made and that is still read.

        Without one close by, it is the largest of any kind there: a cotangent behind its mask.

        Args:
          carried_on: of the body of a loop, whether only what is `_is_carried_on` will do.
        """
        program = self.program
        fallback = None
        for position in range(start - 1, -1, -1):
            step = program.steps[self.order[position]]
            for b in step.writes:
                if program.is_resident[b] or not self._is_read_from(b, start):
                    continue
                if self.body and carried_on and not self._is_carried_on(b, start):
                    continue
                if all(program.steps[r].phase is Phase.UPDATE for r in program.readers[b]):
                    continue  # a weight gradient: nothing but its update hangs on it
                if step.is_heavy and program.buffers[b].nbytes > self.small:
                    return b
                nbytes = program.buffers[b].nbytes
                if fallback is None or nbytes > program.buffers[fallback].nbytes:
                    fallback = b
            if fallback is not None and start - position > 64:
                break
        return fallback

    def _needs_fence(
        self,
        position: int,
        b: int,
        run: int,
        made_in: dict[int, int],
        phase_of: dict[int, Phase],
        fenced_in: dict[int, int],
        ran_in: dict[int, int],
    ) -> bool:
        program = self.program
        step = program.steps[self.order[position]]
        if b not in made_in or made_in[b] == run:
            return False
        # the run that gave `b` the variable that it has now, if that was by a fence or a clone
        remade = program.producer[b] in self.recomputed
        renewed = max(fenced_in.get(b, -10), made_in[b] if remade else -10)
        recent = renewed >= run - 1
        if position in self.held:
            return True
        if self.late[position] and not self.again[position]:
            return not recent and self._holds(position, b, made_in)
        if self.again[position]:
            # every input of a recomputation, whatever its size, and newer than at the last time
            # that the step ran: otherwise the two are merged and the old result lives on
            return not recent or renewed <= ran_in[self.order[position]]
        # a clone is fenced too: the chain that ends it is otherwise computed again by its readers,
        # and keeps what it reads
        fenced = fenced_in.get(b, -10) >= run - 1
        if program.buffers[b].nbytes <= self.small or fenced or made_in[b] < 0:
            return False
        if self.body and step.is_heavy:
            return False  # a product is not made twice, and its operand may be laid out for it
        if step.phase is not Phase.BACKWARD:
            return False
        if phase_of[b] is Phase.FORWARD:
            return True
        # and where all that it reads is there for long already, cotangents of other layers
        large = (r for r in step.reads if program.buffers[r].nbytes > self.small)
        made = ((phase_of.get(r), made_in.get(r, run)) for r in large)
        return step.is_heavy and all(
            by < 0 or (phase is Phase.BACKWARD and by < run - 1) for phase, by in made
        )

    def _is_written_over(self, b: int, start: int, end: int) -> bool:
        """Whether the last reader of `b`, which a library made, stands from `start` to `end` and may
        write its result there. Through a barrier XLA reads it and writes elsewhere."""
        program, by = self.program, self.program.producer[b]
        if by < 0 or not program.steps[by].is_heavy or program.is_resident[b]:
            return False
        if by in self.recomputed:
            return False
        last = next((p for p, write in reversed(self.uses[b]) if not write), -1)
        if not start <= last < end or self.again[last]:
            return False
        step = program.steps[self.order[last]]
        made = lambda b: max((p for p, write in self.uses[b] if write and p < last), default=-1)
        for w in {w for r, w in step.in_place if r == b}:
            # the newest of what it may take is the least likely to be behind a barrier
            dying = [r for r, x in step.in_place if x == w and not self._is_read_from(r, last + 1)]
            if made(b) == max(map(made, dying)):
                return True
        return False

    def _is_carried_on(self, b: int, start: int) -> bool:
        """Whether `b` is a spine in the body of a loop: it leads to two products of the backward pass
        or more from `start` on, as no weight gradient does, and nothing is written over it."""
        if self._is_written_over(b, start, len(self.order)):
            return False
        readers = (self.order[p] for p, write in self.uses[b] if not write and p >= start)
        return max(map(self._products.__getitem__, readers), default=0) > 1

    @functools.cached_property
    def _given_sub_batches(self) -> frozenset[int]:
        """What sub-batches are handed when they begin, totals among it."""
        begins = (step for step in self.program.steps if step.op == BEGIN)
        return frozenset(b for step in begins for b in step.writes)

    @functools.cached_property
    def _products(self) -> dict[int, int]:
        """For every step the most products of the backward pass on one path from it to the end."""
        program, found = self.program, dict[int, int]()
        for s in reversed(self.order):
            step = program.steps[s]
            behind = (found.get(r, 0) for b in step.writes for r in program.readers[b])
            product = step.is_heavy and not step.is_boundary and step.phase is Phase.BACKWARD
            found[s] = max(max(behind, default=0) + product, found.get(s, 0))
        return found

    def _beside(self, spine: int, start: int, end: int) -> int:
        """What the last reader of `spine` reads beside it and was made of it, if that reader writes
        over it in the run from `start` to `end`; else `spine`."""
        if not self._is_written_over(spine, start, end):
            return spine
        last = next(p for p, write in reversed(self.uses[spine]) if not write)
        made = lambda b: max((p for p, write in self.uses[b] if write and p < start), default=-1)
        reads = self.program.steps[self.order[last]].reads
        behind = [b for b in reads if b != spine and made(b) > made(spine)]
        return max(behind, key=made, default=spine)

    def _holds(self, position: int, b: int, made_in: Mapping[int, int]) -> bool:
        """Whether a fence on `b` holds the step at `position`, a forward one in the backward pass.

        What was made before does, and what a library reads. Of what a fusion reads, all of which may
        be there from the start, the smallest does: a fence on an argument writes it to memory.
        """
        step, buffers = self.program.steps[self.order[position]], self.program.buffers
        if made_in[b] >= 0 or step.is_heavy:
            return True
        written = sum(buffers[w].nbytes for w in step.writes)
        smallest = min(step.reads, key=lambda r: buffers[r].nbytes)
        there = all(made_in.get(r, 0) < 0 for r in step.reads)
        return there and b == smallest and buffers[b].nbytes <= written

    def _loose(self, positions: Iterable[int], end: int) -> list[int]:
        """What the steps at `positions`, of the run that stops at `end` and of those before, make for
        later than that run where large values are read last.

        That is the result of such a step, or of what goes on from it within the run: the updated
        weight, or a total of sub-batches, where the gradient is no longer there. However small it is,
        what it keeps is not.
        """
        program = self.program
        loose: list[int] = []
        onward: set[int] = set()  # made from a large value that dies here, and off the spine
        for position in positions:
            step = program.steps[self.order[position]]
            if self.again[position] or (step.phase is Phase.FORWARD and not self.anew):
                continue
            frees = self._frees(position, end)
            follows = any(b in onward for b in step.reads)
            if not frees and not follows:
                continue
            loose += [b for b in step.writes if self._outlives(b, end)]
            # a fusible reader of a large value is computed where that is made, by XLA itself
            heavy = step.is_heavy and not any(self._can_be_spine(b) for b in step.writes)
            if follows or heavy or self._is_for_a_total(self.order[position]):
                onward.update(step.writes)
            elif self.sends:  # what devices add up XLA adds up at the end, many in one
                leads = lambda b: any(map(self._products.get, program.readers[b]))
                onward.update(b for b in step.writes if not leads(b))
        return loose

    def _is_owed(self, position: int, end: int) -> bool:
        """Whether the step at `position` makes a weight gradient of large values that are read from
        `end` on, too. XLA may make it behind all who read them, and keep them until then."""
        program, step = self.program, self.program.steps[self.order[position]]
        readers = [program.steps[r] for b in step.writes for r in program.readers[b]]
        return (
            step.is_heavy
            and step.phase is Phase.BACKWARD
            and not self.again[position]
            and all(reader.phase is Phase.UPDATE for reader in readers)
            and not self._frees(position, end)
        )

    def _is_for_a_total(self, s: int) -> bool:
        """Whether step `s` sums what is added to a total of sub-batches and leads to no product, as
        the gradient to a bias. XLA would take such sums at the end."""
        program, step = self.program, self.program.steps[s]
        readers = [program.steps[r] for b in step.writes for r in program.readers[b]]
        is_added = all(not self._given_sub_batches.isdisjoint(r.reads) for r in readers)
        return step.is_reduction and is_added and not self._products[s]

    def _forward_ties(self, end: int) -> list[Fence]:
        """Fences in the forward pass, which ends at `end`: one before a heavy step, where needed."""
        program = self.program
        found: list[Fence] = []
        waiting: list[tuple[int, int]] = []  # (position, value that only the backward pass reads)
        for position in range(end):
            step = program.steps[self.order[position]]
            if self.again[position]:
                return found  # from here on values are renewed by bursts of recomputation
            held = self._waiting_for_nothing(position)
            if not step.is_heavy:
                waiting += [(position, b) for b in step.writes if self._is_for_later(b)]
                found += [Fence(position, held)] if held else []
                continue
            ties = [b for p, b in waiting if self._frees(p, position)]
            waiting = []
            reads = [b for b in step.reads if program.producer[b] >= 0]
            if ties and reads:
                held = held or (max(reads, key=lambda b: program.buffers[b].nbytes),)
                held = tuple(dict.fromkeys((*held, *ties)))
            found += [Fence(position, held)] if held else []
            waiting = [(position, b) for b in step.writes if self._is_sum_for_later(b, position)]
        return found

    def _waiting_for_nothing(self, position: int) -> tuple[int, ...]:
        """What holds back a step that takes a large workspace, but reads small values alone, such as
        random bits: without it XLA begins all of them at once. () where nothing large is there."""
        program, step = self.program, self.program.steps[self.order[position]]
        is_large = lambda nbytes: nbytes > self.small
        if not is_large(step.workspace) or any(
            is_large(program.buffers[b].nbytes) for b in step.reads
        ):
            return ()
        spine = self._spine(position)
        if spine is None or not is_large(program.buffers[spine].nbytes):
            return ()
        if not step.reads or self._is_written_over(spine, position, len(self.order)):
            return ()
        return (spine, *(b for b in step.reads if b != spine))

    def _is_for_later(self, b: int) -> bool:
        """Whether the backward pass reads `b`, and in the forward pass no heavy step does."""
        readers = [self.program.steps[r] for r in self.program.readers[b]]
        forward = [r for r in readers if r.phase is Phase.FORWARD]
        return len(forward) < len(readers) and not any(r.is_heavy for r in forward)

    def _is_sum_for_later(self, b: int, position: int) -> bool:
        """Whether the product at `position` may have added to another value of the size of `b` that
        nothing else reads, and `b` is for later: XLA may leave the sum out of the kernel and take it
        in the backward pass, and keep both of what is added."""
        program, step = self.program, self.program.steps[self.order[position]]
        if len(step.equations) == 1 or not self._is_for_later(b):
            return False
        size = program.buffers[b].nbytes
        added = [r for r in step.reads if program.buffers[r].nbytes == size > self.small]
        return any(not self._is_read_from(r, position + 1) for r in added)

    def _frees(self, position: int, end: int) -> bool:
        """Whether the step at `position` reads something large that nothing reads from `end` on."""
        program = self.program
        return any(
            not program.is_resident[b]
            and program.buffers[b].nbytes > self.small
            and not self._is_read_from(b, end)
            for b in program.steps[self.order[position]].reads
        )

    def _outlives(self, b: int, end: int) -> bool:
        return self.program.is_resident[b] or self._is_read_from(b, end)
