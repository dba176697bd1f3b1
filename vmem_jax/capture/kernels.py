"""kernels: those of a program, and which of them XLA makes one.

`fuse` finds chains and heavy equations one by one. Neighbouring reductions of the same values are one
kernel, and what makes a mask is one with the reduction that reads it first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from vmem_jax.capture.primitives import Class, class_of, nbytes
from vmem_jax.jax_compat import JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A heavy equation, or a chain of fusible ones, with what it reads and writes.

    Attributes:
      equations: indices of its equations, in order.
      root: the equation that gives it its name: the heavy one, or the last of a chain.
      reads: the existing values that it reads.
      writes: the values that it brings into existence.
      tied: of a tie the values that it compares with what it makes of them.
    """

    equations: tuple[int, ...]
    root: int
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]
    tied: tuple[Var, ...] = ()


def join_siblings(kernels: list[Kernel], eqns: list[JaxprEqn], epoch: list[int]) -> list[Kernel]:
    """Joins neighbouring reductions of the same values: XLA makes one multi-output fusion of them."""
    joined: list[Kernel] = []
    for kernel in kernels:
        last = kernel.root
        if joined and class_of(eqns[last]) is Class.REDUCE and not kernel.tied:
            for back in range(len(joined) - 1, max(len(joined) - 4, -1), -1):
                other = joined[back]
                end = other.root
                between = {v for k in joined[back:] for v in k.writes}
                if epoch[end] != epoch[last] or between & set(kernel.reads):
                    break
                big = max(kernel.reads, key=lambda v: nbytes(v.aval), default=None)
                if class_of(eqns[end]) is Class.REDUCE and big in other.reads and not other.tied:
                    joined[back] = Kernel(
                        tuple(sorted({*other.equations, *kernel.equations})),
                        last,
                        tuple(dict.fromkeys((*other.reads, *kernel.reads))),
                        (*other.writes, *kernel.writes),
                    )
                    break
            else:
                joined.append(kernel)
                continue
            if joined[back] is other:
                joined.append(kernel)
        else:
            joined.append(kernel)
    return joined


def join_masks(
    kernels: Sequence[Kernel], masked: Collection[Var], eqns: list[JaxprEqn]
) -> list[Kernel]:
    """Joins what makes a value of `masked` with the reduction that reads it first, and writes it."""
    joined: list[Kernel] = []
    waiting: dict[Var, Kernel] = {}  # what makes a value that nothing has read yet
    for kernel in kernels:
        for v in kernel.reads:
            if (maker := waiting.pop(v, None)) is None:
                continue
            if class_of(eqns[kernel.root]) is Class.REDUCE and not kernel.tied:
                joined.remove(maker)
                kernel = Kernel(
                    tuple(sorted({*maker.equations, *kernel.equations})),
                    kernel.root,
                    tuple(dict.fromkeys((*maker.reads, *(r for r in kernel.reads if r is not v)))),
                    (*maker.writes, *kernel.writes),
                )
        joined.append(kernel)
        if len(kernel.writes) == 1 and kernel.writes[0] in masked:
            waiting[kernel.writes[0]] = kernel
    return joined


def made_before_read(kernels: list[Kernel], eqns: list[JaxprEqn]) -> Iterator[Kernel]:
    """`kernels`, with what reads the first results of a tie behind all of it."""
    missing = {v for kernel in kernels for v in kernel.writes}  # not made yet
    waiting: list[Kernel] = []
    for kernel in kernels:
        waiting.append(kernel)
        while (ready := _first_ready(waiting, missing, eqns)) is not None:
            missing.difference_update(ready.writes)
            waiting.remove(ready)
            yield ready
    assert not waiting, "no kernel reads what is made behind it"


def read_by_others(
    kernels: Sequence[Kernel], inputs: Sequence[Var], outputs: Sequence[Any]
) -> Callable[[Any], bool]:
    """Whether a value is there after a kernel that reads it."""
    count: dict[Any, int] = dict.fromkeys(inputs, 1)
    for a in (*(v for kernel in kernels for v in kernel.reads), *outputs):
        if isinstance(a, Var):
            count[a] = count.get(a, 0) + 1
    return lambda a: count.get(a, 0) > 1


def _first_ready(waiting: list[Kernel], missing: set[Var], eqns: list[JaxprEqn]) -> Kernel | None:
    """The first kernel that reads nothing of `missing`; effects stay in their order."""
    late = False
    for kernel in waiting:
        effects = any(eqns[i].effects for i in kernel.equations)
        if missing.isdisjoint(kernel.reads) and not (effects and late):
            return kernel
        late = late or effects
    return None
