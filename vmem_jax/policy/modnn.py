"""modnn: Algorithm 1 of moDNN, which simulates the step and makes room when an allocation fails.

Source: Chen et al., "moDNN: Memory Optimal DNN Training on GPUs", DATE 2018, pages 13-18.

- II: tasks read and write data blocks; weights always stay. That graph is the Program itself: its
  steps and buffers, and its arguments and outputs stay (Figure 1).
- IV-A: equation 1 is what a task needs, equation 2 the lower bound of any schedule, equation 3 the
  size of sub-batches (`policy.sub_batch`, `techniques.sub_batches`).
- IV-B, Algorithm 1: task after task, the inputs that are away are allocated and loaded, the outputs
  allocated; a convolution gets the algorithm of the largest gain (equation 5); then data of future
  tasks is prefetched (equation 4).
- IV-B.1: for an allocation that fails, the stretch of neighbouring blocks leaves that delays the
  least (Figures 3 and 4). A block stays if (a) the task needs it, or (b) it was not used since it was
  made or fetched. Where there is no such stretch, everything leaves (defragmentation).

Differs from the paper:
1. Copies out and in have a lane each; the paper has one stream for both.
2. XLA allocates device memory, so blocks are not put side by side by moving them: in a
   defragmentation what the task needs stays where it is. Segments only decide what leaves.
3. A block that left before is only freed the second time in the paper. A Transfer copies it again,
   begun as soon as it is back, so that it seldom shows.
4. Whether the data of a future task can be allocated (line 16; the paper leaves out how that is
   predicted) follows from what is live then in the order, without what is away until later.
5. Of equation 5, the delay of prefetching is that of all data of the next task that waits for any,
   where it does not fit beside the workspace: at most until this task ends.
6. In the paper the next layer reads every Y. An exact residual may be read by the backward pass
   alone; (b) does not hold it where it would be back before that, by the rule of equation 4. That
   leaves other holes, so the paper's (b) is run too, and the faster schedule is taken.
7. Where the step fits with the fastest convolutions, its memory is not looked at as segments, so
   nothing is moved. Without a link nothing is either, and each is the fastest that fits.
8. Where the size of equation 3 compiles to too much, the next even division is tried.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import ClassVar

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.costs import Costs
from vmem_jax.core.liveness import last_reads, taken_over
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.planned import simulate_with, with_convolutions
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline
from vmem_jax.policy.base import AbstractPolicy, Infeasible, Splitting, finish
from vmem_jax.policy.convolving import fastest, fastest_fitting, smallest_workspaces
from vmem_jax.policy.option_checks import check_flag
from vmem_jax.policy.order import lower_order
from vmem_jax.policy.segments import Segments

_WORKSPACE = -1
"""The key of the workspace among the segments."""

Found = tuple[Timeline, dict[int, Configuration]]
"""A schedule, and what does each convolution in it."""


@dataclasses.dataclass(frozen=True)
class MoDNN(AbstractPolicy):
    """Moves neighbouring blocks when an allocation fails, those that delay the next task the least,
    and fetches them in time.

    Attributes:
      sub_batches: whether a step whose largest task does not fit runs in sub-batches, the fewest with
        which a plan fits.

    Raises:
      TypeError: `sub_batches` is no bool.
    """

    name: ClassVar[str] = "modnn"
    needs: ClassVar[tuple[str, ...]] = ("offload",)
    chooses_convolutions: ClassVar[bool] = True
    sub_batches: bool = True

    def __post_init__(self) -> None:
        check_flag("sub_batches", self.sub_batches)

    @property
    def splitting(self) -> Splitting:
        return Splitting.FEWEST if self.sub_batches else Splitting.WHOLE

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        """The plan of Algorithm 1 with `budget`; the lowest that it has, if it has none."""
        order, configurations = lower_order(program, costs), costs.convolutions
        chosen = fastest(configurations)
        timeline = simulate_with(program, order, costs, chosen.items())
        if budget is not None and timeline.peak > budget:
            if costs.link is None or program.resident_nbytes > budget:
                timeline, chosen = _unmoved(program, costs, order, budget)
            else:
                found = schedule(program, costs, order, budget)
                if found is None or found[0].peak > budget:
                    found = _lowest(program, costs, order)
                timeline, chosen = found
        return finish(self.name, program, timeline, budget, convolutions=chosen)


def _unmoved(program: Program, costs: Costs, order: Sequence[int], budget: int) -> Found:
    chosen = smallest_workspaces(costs.convolutions)
    timeline = simulate_with(program, order, costs, chosen.items())
    if timeline.peak <= budget:
        chosen = fastest_fitting(costs.convolutions, timeline, chosen, budget)
        timeline = simulate_with(program, order, costs, chosen.items())
    return timeline, chosen


def _lowest(program: Program, costs: Costs, order: Sequence[int]) -> Found:
    """The schedule of the lowest peak with which Algorithm 1 comes to an end, or nearly so."""
    budget = minimum_peak(program, costs, order)
    found = schedule(program, costs, order, budget)
    most = simulate_with(
        program, order, costs, smallest_workspaces(costs.convolutions).items()
    ).peak
    while found is None:  # a block that cannot leave takes the room
        budget += max((most - budget) // 16, 1)
        if budget >= most:
            return _unmoved(program, costs, order, most)
        found = schedule(program, costs, order, budget)
    return found


def minimum_peak(program: Program, costs: Costs, order: Sequence[int]) -> int:
    """What arguments and outputs take, and the task that needs the most beside them (equation 2).

    Bytes, for the whole batch, with the smallest workspaces.
    """
    smallest = with_convolutions(program, smallest_workspaces(costs.convolutions).items())
    dying = last_reads(program, order)
    most = 0
    for position, s in enumerate(order):
        step = smallest.steps[s]
        taken = set(taken_over(program, step, dying[position]).values())
        blocks = {*step.reads, *step.writes} - taken
        needed = sum(program.buffers[b].nbytes for b in blocks if not program.is_resident[b])
        most = max(most, needed + step.workspace)
    return program.resident_nbytes + most


def schedule(program: Program, costs: Costs, order: Sequence[int], budget: int) -> Found | None:
    """Algorithm 1 within `budget` bytes; None where a task finds no room.

    Its memory of segments is never smaller than what `simulate` counts. What leaves early leaves
    other holes, so where memory is tight criterion (b) to the letter can be better: the faster of
    both is taken.
    """
    found = [_Schedule(program, costs, order, budget, late).run() for late in (True, False)]
    return min(filter(None, found), key=lambda one: one[0].seconds, default=None)


def offloads_end(
    free: float,
    made: Sequence[float],
    seconds: Sequence[float],
    stretches: Iterable[tuple[int, int]],
) -> list[float]:
    """When all of each of `stretches` are out, if they leave one after another (Figure 3).

    Args:
      free: when their lane is, seconds.
      made: for each block when its data is complete.
      seconds: that its copy takes.
      stretches: ranges of blocks, the end excluded; neither begins nor ends fall.
    """
    until = [0.0, *itertools.accumulate(seconds)]
    latest = collections.deque[int]()  # blocks that hold up those before them, less and less
    slack = [at - before for at, before in zip(made, until, strict=False)]
    found, done = [], 0
    for first, end in stretches:
        for n in range(done, end):
            while latest and slack[latest[-1]] <= slack[n]:
                latest.pop()
            latest.append(n)
        done = end
        while latest and latest[0] < first:
            latest.popleft()
        begin = max([free - until[first], *(slack[n] for n in itertools.islice(latest, 1))])
        found.append(begin + until[end])
    return found


def prefetch_is_due(now: float, task: float, transfers: Iterable[float], expected: float) -> bool:
    """Whether data would come too late if fetched only after the task that is next (equation 4).

    Args:
      now: before that task, seconds.
      task: that it takes.
      transfers: that each block takes.
      expected: the begin of the task that reads them.
    """
    return now + task + sum(transfers) > expected


class _Waiting:
    """The blocks that are away and not being fetched, by the task that reads them next."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._left = 0
        self._next: dict[int, int] = {}  # block -> position of that task
        self._at: dict[int, dict[int, tuple[int, int]]] = {}  # and the inverse: when, how large
        self._tasks: list[int] = []  # those positions, rising

    def add(self, b: int, task: int, nbytes: int) -> None:
        if task not in self._at:
            self._at[task] = {}
            bisect.insort(self._tasks, task)
        self._left += 1
        self._at[task][b] = self._left, nbytes
        self._next[b] = task
        self.nbytes += nbytes

    def discard(self, b: int) -> None:
        task = self._next.pop(b, None)
        if task is None:
            return
        self.nbytes -= self._at[task].pop(b)[1]
        if not self._at[task]:
            del self._at[task]
            del self._tasks[bisect.bisect_left(self._tasks, task)]

    def nbytes_until(self, task: int) -> int:
        """Bytes that are read next at `task` or before."""
        tasks = self._tasks[: bisect.bisect_right(self._tasks, task)]
        return sum(nbytes for t in tasks for _, nbytes in self._at[t].values())

    def following(self) -> Iterator[tuple[int, list[int]]]:
        """Tasks in order with their blocks, without what is added while they are looked at."""
        now = self._left
        for task in [*self._tasks]:
            blocks = [b for b, (left, _) in self._at.get(task, {}).items() if left <= now]
            if blocks:
                yield task, blocks


class _Schedule:
    """One run of Algorithm 1; times in seconds, `position` is that of a task in the order."""

    def __init__(
        self,
        program: Program,
        costs: Costs,
        order: Sequence[int],
        budget: int,
        late: bool,
    ) -> None:
        assert costs.link is not None
        self.late = late  # whether what is read late may leave although nothing has used it
        self.program, self.costs, self.order = program, costs, order
        self.link = costs.link
        self.memory = Segments(budget - program.resident_nbytes)
        self.chosen = smallest_workspaces(costs.convolutions)
        self.live = simulate_with(program, order, costs, self.chosen.items()).live_nbytes
        self.budget = budget
        self.dying = last_reads(program, order)
        self.uses: dict[int, list[int]] = {}
        for position, s in enumerate(order):
            for b in (*program.steps[s].reads, *program.steps[s].writes):
                self.uses.setdefault(b, []).append(position)
        seconds = [self.chosen[s].seconds if s in self.chosen else costs.seconds[s] for s in order]
        self.until = [0.0, *itertools.accumulate(seconds)]  # without waits
        self.now = self.out_free = self.in_free = 0.0
        self.begins: list[float] = []
        self.made: dict[int, float] = {}  # when the bytes of a block are complete
        self.used: dict[int, bool] = {}  # whether it was, since it was made or fetched
        self.away: dict[int, tuple[int, int]] = {}  # block -> its points start and gone
        self.waiting = _Waiting()
        self.coming: dict[int, tuple[int, float]] = {}  # block -> its point fetch, and its arrival
        self.back: dict[int, int] = {}  # block -> position of its last return
        self.transfers: list[Transfer] = []

    def run(self) -> Found | None:
        for position, s in enumerate(self.order):
            step = self.program.steps[s]
            reads = [b for b in step.reads if self._counts(b)]
            taken = taken_over(self.program, step, self.dying[position])
            made = [b for b in step.writes if self._counts(b) and b not in taken.values()]
            self.begins.append(self.now)
            needed = {*reads, *step.writes}
            if not self._prepare(position, s, reads, made, needed):
                return None
            seconds = self._choose(position, s, needed)
            self._prefetch(position, needed, seconds)
            self.begins[position] = self.now
            self.now += seconds
            self.memory.free(_WORKSPACE)
            for r, w in taken.items():
                if self._counts(w):
                    self.memory.hand_over(r, w)
                else:
                    self.memory.free(r)
            self.used.update(dict.fromkeys(reads, True))
            self.used.update(dict.fromkeys(step.writes, False))
            self.made.update(dict.fromkeys(step.writes, self.now))
            for b in self.dying[position]:
                if b not in taken:
                    self.memory.free(b)
        transfers = sorted(self.transfers, key=lambda t: (t.start, t.buffer))
        timeline = simulate_with(
            self.program, self.order, self.costs, self.chosen.items(), transfers
        )
        return timeline, self.chosen

    # -- lines 3 to 8: inputs and outputs

    def _prepare(
        self, position: int, s: int, reads: list[int], made: list[int], needed: set[int]
    ) -> bool:
        """Makes room for the task's data and its smallest workspace, and loads what is away."""
        away = [b for b in reads if b in self.away and b not in self.coming]
        for b in (*away, *made):
            if not self._allocate(b, self._nbytes(b), position, needed):
                return False
        workspace = self.program.steps[s].workspace
        if s in self.chosen:
            workspace = self.chosen[s].workspace
        if workspace and not self._allocate(_WORKSPACE, workspace, position, needed):
            return False
        for b in away:
            self._fetch(b, position)
        for b in reads:
            if b in self.coming:
                fetch, arrival = self.coming.pop(b)
                self.now = max(self.now, arrival)
                start, gone = self.away.pop(b)
                self.transfers.append(Transfer(b, start, gone, fetch, position))
                self.back[b] = position
        return True

    def _fetch(self, b: int, position: int) -> None:
        """The fetch of `b` begins now."""
        self.in_free = max(self.in_free, self.now) + self._nbytes(b) / self.link.into
        self.coming[b] = position, self.in_free
        self.waiting.discard(b)

    def _wait(self, b: int, position: int) -> None:
        """`b` is away until a task behind `position` reads it."""
        self.waiting.add(b, self._next_use(b, position), self._nbytes(b))

    def _allocate(self, key: int, nbytes: int, position: int, needed: set[int]) -> bool:
        """Takes memory, after an offload or a defragmentation where that is necessary."""
        if self.memory.allocate(key, nbytes):
            return True
        if self._offload_for(nbytes, position, needed):
            return self.memory.allocate(key, nbytes)
        for segment in self.memory.segments:  # defragmentation
            b = segment.key
            if b is not None and b not in needed and self._movable(b):
                if b in self.coming:
                    del self.coming[b]  # a prefetch that was of no use
                    self._wait(b, position)
                else:
                    self._leave(b, position)
        kept = [
            b
            for x in self.memory.segments
            if (b := x.key) is not None and (b not in self.away or b in self.coming or b in needed)
        ]
        self.memory.pack(kept)
        return self.memory.allocate(key, nbytes)

    # -- IV-B.1: what leaves

    def _offload_for(self, nbytes: int, position: int, needed: Collection[int]) -> bool:
        """Offloads the stretch of blocks that delays the least, if there is one."""
        scheme = self._scheme(nbytes, position, needed)
        if scheme is None:
            return False
        for b in scheme[0]:
            self._leave(b, position)
            self.memory.free(b)
        return True

    def _scheme(
        self, nbytes: int, position: int, needed: Collection[int]
    ) -> tuple[tuple[int, ...], float] | None:
        """The stretch of blocks that delays the least, and by how many seconds."""
        may_leave = lambda b: (
            b not in needed
            and self._movable(b)
            and (self.used[b] or self._is_read_late(b, position))
        )
        keys, stretches = self.memory.schemes(nbytes, may_leave)
        made, seconds = [self.made[b] for b in keys], list(map(self._seconds_out, keys))
        until = [0, *itertools.accumulate(map(self._nbytes, keys))]
        ends = offloads_end(self.out_free, made, seconds, stretches)
        delays = [max(end - self.now, 0.0) for end in ends]
        sizes = [until[end] - until[first] for first, end in stretches]
        found = min(zip(delays, sizes, stretches, strict=True), default=None)
        return found and (tuple(keys[slice(*found[2])]), found[0])

    def _is_read_late(self, b: int, position: int) -> bool:
        """Whether `b`, which no task has used since it was made, would be back before it is read: its
        fetch would not be due (equation 4) when it has left."""
        if not self.late or b in self.coming or b in self.back:
            return False
        gone = max(self.now, max(self.out_free, self.made[b]) + self._seconds_out(b))
        begins = self.now + self.until[self._next_use(b, position)] - self.until[position]
        return not prefetch_is_due(gone, 0.0, [self._nbytes(b) / self.link.into], begins)

    def _seconds_out(self, b: int) -> float:
        """Seconds that `b` takes to leave: none, where host memory has it already."""
        return 0.0 if b in self.back else self._nbytes(b) / self.link.out

    def _leave(self, b: int, position: int) -> None:
        """`b` is gone from `position` on."""
        seconds = self._seconds_out(b)
        begin = max(self.out_free, self.made[b])
        self.now = max(self.now, begin + seconds)
        self.out_free = begin + seconds
        first = max(self.uses[b][0] + 1, self.back.get(b, 0))
        start = max(bisect.bisect_left(self.begins, begin), first)
        self.away[b] = min(start, position), position
        self._wait(b, position)

    # -- lines 9 to 14: the algorithm

    def _choose(self, position: int, s: int, needed: set[int]) -> float:
        """Gives task `s` the algorithm of the largest gain (equation 5); its seconds."""
        if s not in self.chosen:
            return self.costs.seconds[s]
        base = self.chosen[s]
        _, waiting = next(self.waiting.following(), (position, []))
        self.memory.free(_WORKSPACE)
        free = max((x.nbytes for x in self.memory.segments if x.key is None), default=0)
        gains = []
        for configuration in self.costs.convolutions[s]:
            gain = base.seconds - configuration.seconds - self._delayed(waiting, configuration)
            if configuration.workspace > free:
                scheme = self._scheme(configuration.workspace, position, needed)
                if scheme is None:
                    continue
                gain -= scheme[1]
            gains.append((gain, -configuration.workspace, configuration))
        configuration = max(gains, key=lambda entry: entry[:2])[2]
        if configuration.workspace and not self.memory.allocate(
            _WORKSPACE, configuration.workspace
        ):
            self._offload_for(configuration.workspace, position, needed)
            self.memory.allocate(_WORKSPACE, configuration.workspace)
        self.chosen[s] = configuration
        return configuration.seconds

    def _delayed(self, waiting: Collection[int], configuration: Configuration) -> float:
        """Seconds by which prefetching is late because of the workspace of `configuration`."""
        free, late = self.memory.free_nbytes - configuration.workspace, 0.0
        for b in waiting:
            free -= self._nbytes(b)
            if free < 0:
                late += self._nbytes(b) / self.link.into
        return min(late, configuration.seconds)

    # -- lines 15 to 27: prefetching

    def _prefetch(self, position: int, needed: set[int], seconds: float) -> None:
        for later, blocks in self.waiting.following():
            if self._expected(later) > self.budget:
                break
            transfers = [self._nbytes(b) / self.link.into for b in blocks]
            begins = self.now + seconds + self.until[later] - self.until[position + 1]
            if not prefetch_is_due(self.now, seconds, transfers, begins):
                break
            locked = {*needed, *self.program.steps[self.order[later]].reads, _WORKSPACE}
            for b in sorted(blocks):
                nbytes = self._nbytes(b)
                if not self.memory.allocate(b, nbytes):
                    if not self._offload_for(nbytes, position, locked):
                        return
                    self.memory.allocate(b, nbytes)
                self._fetch(b, position)
                self.used[b] = False

    def _expected(self, later: int) -> int:
        """Bytes live at position `later`, if nothing else leaves until then."""
        return self.live[later] - self.waiting.nbytes + self.waiting.nbytes_until(later)

    # -- blocks

    def _counts(self, b: int) -> bool:
        """Whether `b` takes memory that is not there throughout."""
        return not self.program.is_resident[b] and self.program.buffers[b].nbytes > 0

    def _movable(self, b: int) -> bool:
        return b != _WORKSPACE and self.program.buffers[b].movable

    def _nbytes(self, b: int) -> int:
        return self.program.buffers[b].nbytes

    def _next_use(self, b: int, position: int) -> int:
        uses = self.uses[b]
        return uses[bisect.bisect_right(uses, position)]
