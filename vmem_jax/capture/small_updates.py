"""small_updates: updates and sums of small arrays, several of which run as one kernel.

A network has hundreds of small parameters: the scale and the bias of each norm. An update of one
takes as long as it takes to launch a kernel. XLA:GPU makes one kernel of elementwise chains of one
shape, but only of those that read the same array (multi-output fusion). So updates of one shape whose
gradients are all there are one step, and `rewrite` has all of them read one array more.

What is updated early by itself would free no more than its gradient, which is as small. So it is with
what a sub-batch adds to the totals of such gradients: joined, a Swin-T in two of them launches 174 of
2,184 kernels less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Container, Iterable, Iterator, Sequence

from vmem_jax.capture.kernels import Kernel
from vmem_jax.capture.primitives import Class, class_of, nbytes, shape_of
from vmem_jax.core.costs import Costs
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import BEGIN, END, Phase, Program
from vmem_jax.jax_compat import JaxprEqn, Var

LARGEST = 16 << 10
"""Bytes of an array up to which it is small: a card reads and writes several of them in the time in
which it launches a kernel, 2 us of an H200."""

_MOST = 95
"""Arrays that one of XLA's fusions reads and writes (96 in 0.11.2), but for the one that is read
besides."""


def with_small_updates_joined(
    kernels: Sequence[Kernel],
    phases: Sequence[Phase],
    eqns: Sequence[JaxprEqn],
    apart: Collection[Var] = (),
) -> tuple[list[Kernel], list[Phase], dict[Kernel, int]]:
    """`kernels`, of which several updates are joined to one where the last of them stood; the phase
    of each; and for each that is joined the number of parameters that it updates.

    Args:
      phases: of each kernel.
      eqns: those of the flat jaxpr.
      apart: values that are not joined: those in host memory.
    """
    groups = [group for group in _groups(kernels, phases, eqns, apart) if len(group) > 1]
    last = {max(k for update in group for k in update): group for group in groups}
    gone = {k for group in groups for update in group for k in update}
    found: list[Kernel] = []
    found_phases: list[Phase] = []
    counts: dict[Kernel, int] = {}
    for k, (kernel, phase) in enumerate(zip(kernels, phases, strict=True)):
        if k in last:
            kernel = _joined([kernels[each] for update in last[k] for each in update])
            counts[kernel] = len(last[k])
        if k in last or k not in gone:
            found.append(kernel)
            found_phases.append(phase)
    return found, found_phases, counts


def as_apart(costs: Costs, program: Program, machine: Machine) -> Costs:
    """`costs` of a step in which each update is a kernel of its own, as in plain jit."""
    seconds = [
        each + (step.updates - 1) * machine.launch
        for each, step in zip(costs.seconds, program.steps, strict=True)
    ]
    return dataclasses.replace(costs, seconds=tuple(seconds))


def _groups(
    kernels: Sequence[Kernel],
    phases: Sequence[Phase],
    eqns: Sequence[JaxprEqn],
    apart: Collection[Var],
) -> Iterator[list[list[int]]]:
    """Updates of one shape that fit into one kernel, each as the kernels that it is made of."""
    waiting: dict[tuple[bool, tuple[int, ...]], list[list[int]]] = {}
    _, end = _boundaries(kernels, eqns)
    for update in _updates(kernels, phases, eqns, apart):
        kind = update[0] < end, _shape(kernels[update[0]])
        before = waiting.setdefault(kind, [])
        whole = _joined([kernels[k] for each in (*before, update) for k in each])
        if before and len(whole.reads) + len(whole.writes) > _MOST:
            yield waiting.pop(kind)
        waiting.setdefault(kind, []).append(update)
    yield from waiting.values()


def _updates(
    kernels: Sequence[Kernel],
    phases: Sequence[Phase],
    eqns: Sequence[JaxprEqn],
    apart: Collection[Var],
) -> Iterator[list[int]]:
    """The kernels of each update that may be joined: those of one shape that read each other, which
    make nothing that others read, from something of that size that the step made. Of a sub-batch it
    is what adds to a total, which only the end of the sub-batch reads."""
    readers: dict[Var, set[int]] = {}
    maker: dict[Var, int] = {}
    for k, kernel in enumerate(kernels):
        maker.update(dict.fromkeys(kernel.writes, k))
        for v in kernel.reads:
            readers.setdefault(v, set()).add(k)
    begin, end = _boundaries(kernels, eqns)
    totals = {*kernels[begin].writes} if begin >= 0 else set()

    def may_be(k: int, kernel: Kernel) -> bool:
        if k > end:  # what a sub-batch makes stays in its loop
            return phases[k] is Phase.UPDATE
        is_read_there = all(readers.get(v) == {end} for v in kernel.writes)
        return is_read_there and not totals.isdisjoint(kernel.reads)

    small = {
        k
        for k, kernel in enumerate(kernels)
        if may_be(k, kernel) and _is_small(kernel, eqns, apart)
    }
    seen: set[int] = set()
    for k in sorted(small):
        if k in seen:
            continue
        shape, update, stack = _shape(kernels[k]), {k}, [k]
        while stack:
            kernel = kernels[stack.pop()]
            near = {r for v in kernel.writes for r in readers.get(v, ())}
            near |= {maker[v] for v in kernel.reads if v in maker}
            more = {n for n in near & small - update if _shape(kernels[n]) == shape}
            update |= more
            stack += more
        seen |= update
        made = {v for each in update for v in kernels[each].writes}
        is_read_elsewhere = any(readers.get(v, set()) - update - {end} for v in made)
        whole = _joined([kernels[each] for each in sorted(update)])
        if not is_read_elsewhere and gradients(whole.reads, whole.writes[0], maker):
            yield sorted(update)


def _boundaries(kernels: Sequence[Kernel], eqns: Sequence[JaxprEqn]) -> tuple[int, int]:
    """Where a sub-batch begins and ends, -1 where there are none."""
    names = [eqns[kernel.root].primitive.name for kernel in kernels]
    return (names.index(BEGIN), names.index(END)) if BEGIN in names else (-1, -1)


def gradients(reads: Iterable[Var], written: Var, made: Container[Var]) -> list[Var]:
    """What an update that writes `written` reads of that size, of what the step `made`."""
    size = math.prod(shape_of(written))
    return [v for v in reads if v in made and math.prod(shape_of(v)) == size]


def _joined(parts: Sequence[Kernel]) -> Kernel:
    made = {v for part in parts for v in part.writes}
    return Kernel(
        equations=tuple(sorted({i for part in parts for i in part.equations})),
        root=parts[-1].root,
        reads=tuple(dict.fromkeys(v for part in parts for v in part.reads if v not in made)),
        writes=tuple(v for part in parts for v in part.writes),
    )


def _is_small(kernel: Kernel, eqns: Sequence[JaxprEqn], apart: Collection[Var]) -> bool:
    """Whether it is an elementwise chain that writes small arrays of one shape."""
    kinds = {class_of(eqns[i]) for i in kernel.equations}
    return (
        kinds <= {Class.FUSIBLE, Class.VIEW}
        and not kernel.tied
        and not any(eqns[i].effects for i in kernel.equations)
        and len({shape_of(v) for v in kernel.writes}) == 1
        and all(0 < nbytes(v.aval) <= LARGEST for v in kernel.writes)
        and math.prod(_shape(kernel)) > 1
        and not {*kernel.reads, *kernel.writes} & {*apart}
    )


def _shape(kernel: Kernel) -> tuple[int, ...]:
    return shape_of(kernel.writes[0])
