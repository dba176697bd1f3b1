"""instructions: a plan as XLA:GPU's scheduler sees it, as kernels, barriers and elements of tuples.

What is read through a barrier is freed only once all that the barrier returns has been taken out of
its tuple.

XLA pads and cuts off around its own convolutions in kernels of their own, and makes one kernel of two
elementwise steps of the backward pass that read the same large value, if neither waits for the other.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from vmem_jax.core.convolution import Pass
from vmem_jax.core.params import PARAMS
from vmem_jax.core.program import Buffer, Kind, Phase, Program, Step
from vmem_jax.core.schedule import Do, Event, actions
from vmem_jax.core.stated_layouts import updated_as_they_are

POINTER = 8
"""Bytes of one entry of a tuple."""


@dataclasses.dataclass
class _Kernel:
    """A kernel: its step, and the values that it reads and writes."""

    step: Step
    reads: list[int]
    writes: list[int]


class Instructions:
    """The instructions of a plan: kernels, barriers, and what takes an element out of their tuples.

    Attributes:
      nbytes: bytes of each value.
      buffer: of each value the buffer that it is a version of; −1 for a tuple and a padded copy.
      value, node: of each buffer its latest version, and the instruction that gives it.
      operands: for each instruction those whose results it takes.
      uses: for each the values that it uses: of a tuple all that are in it.
      defined: for each the bytes that it writes.
      kernels: instruction -> the kernel that it is.
      barriers: instruction -> the values that it holds.
      filled: kernels that read nothing, each with the barrier that holds the number which it writes.
      allocations: instructions that allocate a stack, each with the loop that fills it.
    """

    def __init__(self, program: Program, events: Iterable[Event], own: Iterable[int] = ()) -> None:
        self.program, self.own = program, frozenset(own)
        self.nbytes: list[int] = []
        self.buffer: list[int] = []
        self.value: dict[int, int] = {}
        self.node: dict[int, int] = {}
        self.operands: list[tuple[int, ...]] = []
        self.uses: list[tuple[int, ...]] = []
        self.defined: list[int] = []
        self.kernels: dict[int, _Kernel] = {}
        self.barriers: dict[int, tuple[int, ...]] = {}
        self.allocations: dict[int, int] = {}
        self.filled: dict[int, int] = {}
        self.scalars: set[int] = set()
        self.copies: dict[int, int] = {}  # filter -> what is transposed of it
        self.themselves = updated_as_they_are(program)
        self.latest: list[tuple[int, int, Step]] = []  # (instruction, tuple, step) to merge with
        for b in program.inputs:
            self.value[b] = self._value(program.buffers[b].nbytes, b)
            self.node[b] = self._node((), (), 0)
        self.arguments = len(self.nbytes)
        barrier: int | None = None  # right in front of the event
        for event in events:
            if event.do is Do.BARRIER:
                barrier = self._barrier(event.buffers)
                continue
            if event.do is Do.RUN:
                self._run(event.index)
                if barrier is not None and not program.steps[event.index].reads:
                    self.filled[next(reversed(self.kernels))] = barrier
            barrier = None

    def _barrier(self, buffers: Sequence[int]) -> int | None:
        """The instruction; None where there is nothing to hold."""
        held = [b for b in buffers if b in self.node]
        if not held:
            return None
        values = tuple(self.value[b] for b in held)
        pair = self._value(POINTER * len(held))
        made = self._node([self.node[b] for b in held], values, self.nbytes[pair])
        made = self._node((made,), (pair, *values), 0)
        self.barriers[made] = values
        for b in held:
            self.node[b] = self._node((made,), (pair, *values), 0)
        return made

    def _run(self, s: int) -> None:
        program, step = self.program, self.program.steps[s]
        if step.op == "rev" and len(step.reads) == len(step.writes) == 1:
            self.copies[step.reads[0]] = step.writes[0]
        reads = [r for r in step.reads if r in self.node]
        kernel = _Kernel(step, [self.value[r] for r in reads], [])
        taken = reads
        if step.phase is Phase.UPDATE:  # which reads the transposed filter
            taken = [r if r in self.themselves else self.copies.get(r, r) for r in reads]
        operands = [self.node[r] for r in taken]
        uses = [self.value[r] for r in taken]
        padded = self._padded(s, step)
        if padded and (x := self._argument_x(step, reads)) is not None:
            copy = self._pad(step, [self.value[x]], [self.node[x]], padded)
            at = reads.index(x)
            kernel.reads[at] = uses[at] = copy
            operands[at] = len(self.operands) - 1
            kernel.step = dataclasses.replace(step, workspace=step.workspace - padded)
        elif padded and step.convolution and step.convolution.which is Pass.BACKWARD_DATA:
            copy = self._pad(step, kernel.reads, operands, padded)
            operands, uses, kernel.reads = [len(self.operands) - 1], [copy], [copy]
            kernel.step = dataclasses.replace(step, workspace=step.workspace - padded, fusible=True)
        for r in step.copied:
            at, size = reads.index(r), program.buffers[r].nbytes
            copy = self._piece(step, "transpose", True, [uses[at]], [operands[at]], size)
            operands[at], uses[at] = len(self.operands) - 1, copy
            kernel.reads[at] = copy
            workspace = kernel.step.workspace - size
            kernel.step = dataclasses.replace(kernel.step, workspace=workspace)
        kernel.writes = [self._value(program.buffers[w].nbytes, w) for w in step.writes]
        self.value.update(zip(step.writes, kernel.writes, strict=True))
        if (found := self._sibling(step, reads, operands)) is not None:
            self._join(*found, kernel, operands, uses)
            return
        if step.recopied:
            self._add_recopied(kernel, operands, uses)
        else:
            self._add(kernel, operands, uses)

    def _add_recopied(self, kernel: _Kernel, operands: Sequence[int], uses: Sequence[int]) -> None:
        """The kernel, and one that copies its result, which alone is of a buffer."""
        [w], [made] = kernel.step.writes, kernel.writes
        size = self.nbytes[made]
        kernel.writes = [self._value(size)]
        workspace = kernel.step.workspace - size
        kernel.step = dataclasses.replace(kernel.step, workspace=workspace)
        self._add(kernel, operands, uses)
        self._piece(kernel.step, "transpose", True, kernel.writes, [self.node[w]], size, made)
        self.node[w] = len(self.operands) - 1

    def _add(self, kernel: _Kernel, operands: Sequence[int], uses: Sequence[int]) -> None:
        """A kernel of its own. What a library makes, and what is one of several, is in a tuple."""
        step, writes = kernel.step, kernel.writes
        made = sum(self.nbytes[v] for v in writes)
        several = len(writes) > 1 or not step.fusible
        pair = self._value(2 * POINTER) if several else -1
        here = self._node(operands, uses, made + (2 * POINTER if several else 0))
        self.kernels[here] = kernel
        if len(writes) == 1 and self.nbytes[writes[0]] <= POINTER // 2:
            self.scalars.add(here)
        for w in step.writes:
            self.node[w] = self._node((here,), (pair, *writes), 0) if several else here
        if step.phase is Phase.BACKWARD and step.fusible and len(writes) == 1:
            self.latest.append((here, self._value(2 * POINTER), step))

    def _join(
        self, here: int, pair: int, kernel: _Kernel, operands: Sequence[int], uses: Sequence[int]
    ) -> None:
        """Makes `kernel` a part of the one that `here` is."""
        whole = self.kernels[here]
        self.operands[here] = tuple(dict.fromkeys((*self.operands[here], *operands)))
        self.uses[here] = tuple(dict.fromkeys((*self.uses[here], *uses)))
        self.defined[here] += sum(self.nbytes[v] for v in kernel.writes)
        new = [v for v in kernel.reads if v not in whole.reads]
        self.kernels[here] = _Kernel(
            dataclasses.replace(whole.step, workspace=whole.step.workspace + kernel.step.workspace),
            [*whole.reads, *new],
            [*whole.writes, *kernel.writes],
        )
        for w in kernel.step.writes:
            self.node[w] = self._node((here,), (pair, *kernel.writes), 0)

    def _sibling(
        self, step: Step, reads: Sequence[int], operands: Sequence[int]
    ) -> tuple[int, int] | None:
        """What XLA makes one kernel of with `step`, and its tuple; None for a kernel of its own."""
        if step.phase is not Phase.BACKWARD or not step.fusible or len(step.writes) > 1:
            return None
        buffers = self.program.buffers
        size = buffers[step.writes[0]].nbytes
        for here, pair, other in self.latest[: -1 - PARAMS.siblings : -1]:
            if buffers[other.writes[0]].nbytes != size:
                continue
            shared = [r for r in reads if r in other.reads and buffers[r].nbytes == size]
            several = len(step.equations) > 1 or len(other.equations) > 1
            if not several or not any(self.node[r] in self.operands[here] for r in shared):
                continue
            if not self._waits_for(here, operands):
                return here, pair
        return None

    def _waits_for(self, here: int, operands: Iterable[int]) -> bool:
        """Whether anything in `operands` is made of what the instruction `here` makes."""
        stack, seen = list(operands), set[int]()
        while stack:
            i = stack.pop()
            if i == here:
                return True
            if i > here and i not in seen:
                seen.add(i)
                stack += self.operands[i]
        return False

    def _padded(self, s: int, step: Step) -> int:
        """Bytes of the padded copy that XLA makes for `step`; 0 for none."""
        convolution = step.convolution
        if convolution is None or s in self.own:
            return 0
        padded = convolution.padded_nbytes
        return padded if padded <= step.workspace else 0

    def _argument_x(self, step: Step, reads: Sequence[int]) -> int | None:
        """What a convolution reads in a padded copy, but for the step's arguments, of which one copy
        is made for all."""
        convolution = step.convolution
        assert convolution is not None
        if convolution.which is Pass.BACKWARD_DATA:
            return None
        sizes = self.program.buffers
        found = [r for r in reads if sizes[r].nbytes == convolution.x_nbytes]
        return found[0] if found and self.value[found[0]] >= self.arguments else None

    def _pad(self, step: Step, reads: Sequence[int], operands: Sequence[int], padded: int) -> int:
        """What `step` pads, or makes before a part is cut off: the value."""
        pads = step.convolution is not None and step.convolution.which is not Pass.BACKWARD_DATA
        return self._piece(step, "pad" if pads else step.op, pads, reads, operands, padded)

    def _piece(
        self,
        step: Step,
        op: str,
        fusible: bool,
        reads: Sequence[int],
        operands: Sequence[int],
        nbytes: int,
        made: int | None = None,
    ) -> int:
        """A kernel of its own for a part of `step`, the last instruction: the value that it makes,
        a new one of so many bytes or `made`."""
        made = self._value(nbytes) if made is None else made
        piece = dataclasses.replace(step, op=op, fusible=fusible, workspace=0, convolution=None)
        here = self._node(operands, reads, nbytes)
        self.kernels[here] = _Kernel(piece, [*reads], [made])
        return made

    def _value(self, nbytes: int, buffer: int = -1) -> int:
        self.nbytes.append(nbytes)
        self.buffer.append(buffer)
        return len(self.nbytes) - 1

    def _node(self, operands: Iterable[int], uses: Iterable[int], defined: int) -> int:
        self.operands.append(tuple(dict.fromkeys(operands)))
        self.uses.append(tuple(dict.fromkeys(uses)))
        self.defined.append(defined)
        return len(self.operands) - 1

    def with_allocations(self) -> Instructions:
        """These instructions, and those that allocate the stacks of loops, which need no operand.

        Here is, too, what decides between XLA's orders where there are loops: a loop returns all that
        it is given in one tuple, with what it does not change; what `filled` has waits for its
        barrier; and a loss is computed in front of its gradient (`_gradient_of`).
        """
        found = copy.copy(self)
        for name in ("nbytes", "buffer", "operands", "uses", "defined", "allocations"):
            setattr(found, name, copy.copy(getattr(self, name)))
        for here, kernel in self.kernels.items():
            step = kernel.step
            writes = zip(step.writes, kernel.writes, strict=True) if step.stacked else ()
            stacks = [v for w, v in writes if w in step.stacked]
            for v in stacks:
                found.uses[here] = (*found.uses[here], found._value(self.nbytes[v]))
                allocation = found._node((), (), self.nbytes[v])
                found.operands[here] = (*found.operands[here], allocation)
                found.allocations[allocation] = here
            if stacks:
                values = (*kernel.reads, *kernel.writes)
                found.defined[here] = sum(self.nbytes[v] + POINTER for v in values)
        for here, barrier in self.filled.items():
            found.operands[here] = (*found.operands[here], barrier)
        for here in sorted(self.scalars):
            for after in found._gradient_of(here):
                found.operands[after] = (*found.operands[after], here)
        return found

    def _gradient_of(self, here: int) -> Iterator[int]:
        """The first elementwise kernel of the backward pass that reads a large value of which the
        kernel `here` makes one number, if any: XLA computes what both need in one kernel."""
        large = {v for v in self.kernels[here].reads if self.nbytes[v] > POINTER // 2}
        before = self._before(here)
        for other, kernel in self.kernels.items():
            elementwise = kernel.step.fusible and kernel.step.phase is Phase.BACKWARD
            if other not in before and elementwise and not large.isdisjoint(kernel.reads):
                yield other
                return

    def _before(self, here: int) -> set[int]:
        """The instruction `here`, and all that it waits for."""
        stack, found = [here], set[int]()
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                stack += self.operands[i]
        return found

    def scheduled(self, order: Iterable[int]) -> tuple[Program, tuple[Event, ...]]:
        """A program in which each kernel runs once, in `order`, and each version of a value is a
        buffer; and its events."""
        program = self.program
        ids: dict[int, int] = {}
        buffers: list[Buffer] = []
        steps: list[Step] = []
        held: dict[int, list[int]] = {}  # position -> what barriers hold there

        def of(v: int) -> int:
            if v not in ids:
                ids[v] = len(buffers)
                b = self.buffer[v]
                made = Buffer(self.nbytes[v], Kind.ACTIVATION, "")
                buffers.append(program.buffers[b] if b >= 0 else made)
            return ids[v]

        inputs = tuple(of(v) for v in range(self.arguments))
        for here in order:
            if here in self.barriers:
                held.setdefault(len(steps), []).extend(map(of, self.barriers[here]))
            if here not in self.kernels:
                continue
            kernel = self.kernels[here]
            reads, writes = tuple(map(of, kernel.reads)), tuple(map(of, kernel.writes))
            now = {self.buffer[v]: ids[v] for v in (*kernel.reads, *kernel.writes)}
            pairs = ((now.get(r), now.get(w)) for r, w in kernel.step.in_place)
            in_place = tuple((r, w) for r, w in pairs if r is not None and w is not None)
            steps.append(
                dataclasses.replace(kernel.step, reads=reads, writes=writes, in_place=in_place)
            )
        given = dict(zip(program.inputs, inputs, strict=True))
        last = {b: of(self.value[b]) for b in program.outputs}
        found = Program(
            tuple(buffers),
            tuple(steps),
            inputs,
            tuple(last[b] for b in program.outputs),
            tuple((given[i], last[o]) for i, o in program.aliases),
        )
        events: list[Event] = []
        for event in actions(found, range(len(steps))):
            if event.do is Do.RUN and event.position in held:
                events.append(
                    Event(Do.BARRIER, event.position, buffers=tuple(held[event.position]))
                )
            events.append(event)
        return found, tuple(events)

    def alive(self) -> list[int]:
        """The instructions that are there: barriers, and what something takes or that has an effect.
        XLA drops a kernel whose results nothing reads, as where a plan drops them right away."""
        waiting = [self.node[b] for b in self.program.outputs]
        waiting += [i for i, kernel in self.kernels.items() if not kernel.step.pure]
        waiting += [*self.allocations, *self.allocations.values(), *self.barriers]
        needed: set[int] = set()
        while waiting:
            i = waiting.pop()
            if i not in needed:
                needed.add(i)
                waiting += self.operands[i]
        return sorted(needed)
