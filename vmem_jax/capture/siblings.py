"""siblings: which kernels XLA:GPU merges since they read the same arrays, and what that saves.

Of two kernels that read one array XLA makes one with several results, if neither depends on the
other, both run through as many elements (those of the result, or of what is reduced), and one of them
is of several operations. Reductions along other axes stay apart, and so does what is written into a
slice of another array, as what a loop stacks. A merged kernel reads each array once.

What makes a value that several read is merged in the same way with one of its readers in an
iteration, which need not read it then. (XLA leaves to a kernel of its own what by its estimate takes
longer in the fewer threads of a reduction, such as a sine. Here reductions take in all.)

XLA looks at no order and at no distance. A plan may move a step, and what it computes again it keeps
apart from all that stands around it, and reads what it reads itself. So here kernels are merged
where no plan does that: in an iteration of a loop, and behind the forward pass between two library
kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from vmem_jax.capture.kernels import Kernel
from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.capture.traffic import read_nbytes
from vmem_jax.core.program import Phase
from vmem_jax.jax_compat import JaxprEqn, Var

_MOST_REDUCTIONS = 8
_MOST_ARRAYS = 64
"""A merged kernel's reductions, and its operands and results, at most: more would take too many
registers, or parameters."""


def saved_by_merging(
    kernels: Sequence[Kernel],
    phases: Sequence[Phase],
    eqns: Sequence[JaxprEqn],
    size: Callable[[Var], int],
    is_body: bool = False,
    boundary: int | None = None,
    products: Sequence[Sequence[int]] = (),
    stacked: Collection[Var] = (),
) -> tuple[tuple[int, bool], ...]:
    """Of each of `kernels` the bytes that it need not read, since another that it is merged with
    does, and whether that one launches it, too.

    Args:
      phases: of the kernels.
      size: bytes of a value on one device.
      is_body: whether they are an iteration of a loop.
      boundary: where they are one of a loop and of the loop behind it, the first equation of that.
        What the first one makes may be computed again, and is merged then among itself.
      products: those that are computed as one, by their equations (`capture.shared_operands`).
      stacked: what an iteration makes for stacks alone.
    """
    saved = [(0, False)] * len(kernels)
    windows: Iterator[list[int]] = _windows(kernels, phases, eqns)
    if is_body:
        late = [kernel.root >= (boundary or 0) for kernel in kernels]
        windows = iter(
            [[k for k, is_late in enumerate(late) if is_late is each] for each in (False, True)]
        )
    for window in windows:
        merging = _Merging([kernels[k] for k in window], eqns, size, is_body, stacked)
        for k, less in zip(window, merging.saved(), strict=True):
            saved[k] = less
    of = {kernel.root: k for k, kernel in enumerate(kernels)}
    for first, *others in products:
        for k in (of[i] for i in others):
            shared = {*kernels[of[first]].reads}.intersection(kernels[k].reads)
            saved[k] = sum(map(size, shared)), True
    return tuple(saved)


def _windows(
    kernels: Sequence[Kernel], phases: Sequence[Phase], eqns: Sequence[JaxprEqn]
) -> Iterator[list[int]]:
    """The kernels of one phase behind the forward pass, between two library kernels."""
    window: list[int] = []
    for k, (kernel, phase) in enumerate(zip(kernels, phases, strict=True)):
        ends = class_of(eqns[kernel.root]) is Class.HEAVY
        if window and (ends or phases[window[-1]] is not phase):
            yield window
            window = []
        if not ends and phase is not Phase.FORWARD:
            window.append(k)
    if window:
        yield window


def _elements(v: Var) -> int:
    return math.prod(getattr(v.aval, "shape", ()))


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What a kernel runs through.

    Attributes:
      elements: their number.
      axes: what the reductions at its end sum over; None if there are none.
      reductions: their number.
    """

    elements: int
    axes: tuple[int, ...] | None = None
    reductions: int = 0


class _Merging:
    """Merges kernels in groups, in XLA's order: for the readers of the last value first."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        eqns: Sequence[JaxprEqn],
        size: Callable[[Var], int],
        is_body: bool,
        stacked: Collection[Var],
    ) -> None:
        self.kernels, self.eqns, self.size, self.is_body = kernels, eqns, size, is_body
        self.stacked = {*stacked}
        self.readers: dict[Var, list[int]] = {}
        self.maker = {v: k for k, kernel in enumerate(kernels) for v in kernel.writes}
        self.memory: dict[Var, Var] = {}  # of what a barrier gives through the value before it
        for k, kernel in enumerate(kernels):
            for v in kernel.reads:
                self.readers.setdefault(v, []).append(k)
            root = eqns[kernel.root]
            if root.primitive.name == "optimization_barrier":
                for a, v in zip(root.invars, root.outvars, strict=True):
                    if isinstance(a, Var):
                        self.memory[v] = self.memory.get(a, a)
        self.loops = [self._loop(kernel) for kernel in kernels]
        self.group = [*range(len(kernels))]
        self.members = {k: [k] for k in range(len(kernels))}

    def saved(self) -> list[tuple[int, bool]]:
        """Bytes that each kernel need not read, and whether it is launched with another."""
        made = [v for kernel in self.kernels for v in kernel.writes]
        given = set(self.readers).difference(made)
        for v in (*reversed(made), *(v for v in self.readers if v in given)):
            self._merge_readers(v)
            if self.is_body:
                self._merge_maker(v)
        found = [(0, False)] * len(self.kernels)
        for members in self.members.values():
            read: set[tuple[Var, frozenset[int]]] = set()
            for k in members:
                how = {v: (self.memory.get(v, v), self._part(v, k)) for v in self.kernels[k].reads}
                less = sum(self._nbytes(v, k) for v in how if how[v] in read)
                found[k] = less, k != members[0]
                read.update(how.values())
                read.update((v, frozenset()) for v in self.kernels[k].writes)
        return found

    def _loop(self, kernel: Kernel) -> _Loop | None:
        """What `kernel` runs through; None if it is merged with no other."""
        root = self.eqns[kernel.root]
        if class_of(root) is Class.HEAVY or kernel.tied or not kernel.writes:
            return None
        if any(self._is_written_into(v) for v in kernel.writes):
            return None
        ends = [eqn for i in kernel.equations if class_of(eqn := self.eqns[i]) is Class.REDUCE]
        if not ends:
            first, *others = (_elements(v) for v in kernel.writes)
            return _Loop(first) if all(n == first for n in others) else None
        reduced = {(eqn.invars[0].aval.shape, eqn.params.get("axes")) for eqn in ends}
        if len(reduced) > 1 or class_of(root) is not Class.REDUCE:
            return None
        [(shape, axes)] = reduced
        return _Loop(math.prod(shape), axes, len(ends))

    def _is_written_into(self, v: Var) -> bool:
        """Whether `v` is made where it is written into an array: by an update that alone reads it, or
        by the loop, if no kernel but fused ones reads it in an iteration: they compute it themselves.
        """
        readers = [self.eqns[self.kernels[k].root] for k in self.readers.get(v, ())]
        if v in self.stacked:
            return all(class_of(eqn) is not Class.HEAVY for eqn in readers)
        return [eqn.primitive.name for eqn in readers] == ["dynamic_update_slice"]

    def _is_chain(self, k: int) -> bool:
        own = [i for i in self.kernels[k].equations if class_of(self.eqns[i]) is not Class.VIEW]
        return len(own) > 1

    def _nbytes(self, v: Var, k: int) -> int:
        return read_nbytes(v, self.kernels[k], self.eqns, self.size)

    def _part(self, v: Var, k: int) -> frozenset[int]:
        """The equations of kernel `k` that read a part of `v`; none if it reads all."""
        if self._nbytes(v, k) == self.size(v):
            return frozenset()
        return frozenset(i for i in self.kernels[k].equations if v in self.eqns[i].invars)

    def _merge_readers(self, v: Var) -> None:
        if _elements(v) == 1:
            return
        groups = dict.fromkeys(self.group[k] for k in self.readers.get(v, ()))
        waiting = sorted(groups, key=lambda group: -len(self.members[group]))
        while waiting:
            one = waiting.pop(0)
            for other in [*waiting]:
                alike = self._parts(v, one) & self._parts(v, other)
                if alike and self._fit(one, other) and not self._depend(one, other):
                    self._merge(one, other)
                    waiting.remove(other)

    def _merge_maker(self, v: Var) -> None:
        """Merges what makes `v` with one of its readers."""
        maker = self.maker.get(v)
        if maker is None or len(self.members[self.group[maker]]) > 1:
            return
        if (loop := self.loops[maker]) is None or loop.reductions:
            return
        groups = dict.fromkeys(self.group[k] for k in self.readers.get(v, ()))
        behind = {group for other in groups for group in self._behind(other)}
        for group in sorted(groups, key=lambda group: -len(self.members[group])):
            if group not in behind and self._fit(group, maker):
                self._merge(group, maker)
                return

    def _parts(self, v: Var, group: int) -> set[frozenset[int]]:
        return {self._part(v, k) for k in self.members[group] if v in self.kernels[k].reads}

    def _fit(self, one: int, other: int) -> bool:
        both = (*self.members[one], *self.members[other])
        if len(both) == 2 and not any(map(self._is_chain, both)):
            return False
        loops = [loop for k in both if (loop := self.loops[k]) is not None]
        if len(loops) < len(both) or len({loop.elements for loop in loops}) > 1:
            return False
        if len({loop.axes for loop in loops if loop.reductions}) > 1:
            return False
        arrays = {v for k in both for v in (*self.kernels[k].reads, *self.kernels[k].writes)}
        reductions = sum(loop.reductions for loop in loops)
        return reductions <= _MOST_REDUCTIONS and len(arrays) <= _MOST_ARRAYS

    def _depend(self, one: int, other: int) -> bool:
        return other in self._behind(one) or one in self._behind(other)

    def _behind(self, group: int) -> set[int]:
        """The groups that depend on `group`."""
        found: set[int] = set()
        waiting = [group]
        while waiting:
            made = [v for k in self.members[waiting.pop()] for v in self.kernels[k].writes]
            new = {self.group[k] for v in made for k in self.readers.get(v, ())} - found
            found |= new
            waiting += new
        return found

    def _merge(self, one: int, other: int) -> None:
        moved = self.members.pop(other)
        self.members[one] = sorted((*self.members[one], *moved))
        for k in moved:
            self.group[k] = one
