"""run_order: the order in which XLA:GPU runs the kernels of a plan.

XLA tries three orders, by list scheduling, depth-first and in post-order, and takes the one for which
it counts the fewest bytes at the peak, the first of equals (`DefaultModuleScheduler` in XLA's
hlo_memory_scheduler.cc). List scheduling is best without loops, as far as we have seen. With loops it
allocates the stacks of all of them in front of the first: to allocate one needs no operand and makes
less than a loop does, which makes a tuple of all that it reads and writes.

What XLA counts is what is live and, where a loop begins, its stacks and what it carries twice, since
each iteration is given a value of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vmem_jax.core.depth_first import depth_first, post_order
from vmem_jax.core.heap import intervals
from vmem_jax.core.instructions import Instructions
from vmem_jax.core.list_schedule import list_order
from vmem_jax.core.program import Program
from vmem_jax.core.schedule import Event


def is_known(program: Program) -> bool:
    """Whether `as_run` knows the order of `program`: XLA:GPU runs it, it has no sub-batches, and
    nothing of it is in host memory."""
    is_split = any(step.is_boundary for step in program.steps)
    return program.on_gpu and not program.hosted and not is_split


def as_run(
    program: Program, events: Iterable[Event], own: Iterable[int] = ()
) -> tuple[Program, tuple[Event, ...]]:
    """What XLA runs of `events`, steps and barriers, as a program in which each kernel runs once, in
    the one of the three orders that XLA takes, and each version of a value is a buffer; and its
    events.

    Args:
      own: convolutions that no call of XLA runs, so that nothing is padded for them.
    """
    graph = Instructions(program, events, own)
    allocating = graph.with_allocations()
    if not allocating.allocations:
        return graph.scheduled(list_order(graph))
    orders = [f(allocating) for f in (list_order, depth_first, post_order)]
    needs = [counted_nbytes(allocating, order) for order in orders]
    best = needs.index(min(needs))
    return graph.scheduled(orders[best] if best else list_order(graph))


def counted_nbytes(graph: Instructions, order: Sequence[int]) -> int:
    """The bytes that XLA counts at the peak of `order`, but for the residents."""
    found, events = graph.scheduled(order)
    kernels = [i for i in order if i in graph.kernels]
    position = {i: p for p, i in enumerate(kernels)}
    change = np.zeros(len(kernels) + 1, np.int64)
    for each in intervals(found, range(len(kernels)), (), events, True):
        change[each.first] += each.nbytes
        change[each.last + 1] -= each.nbytes
    ran = 0
    for i in order:
        if i in position:
            ran = position[i] + 1
        elif i in graph.allocations:
            change[ran] += graph.defined[i]
            change[position[graph.allocations[i]]] -= graph.defined[i]
    live = np.cumsum(change)[:-1]
    for i in set(graph.allocations.values()):
        step = found.steps[position[i]]
        twice = sum(found.buffers[w].nbytes for w in step.writes)
        live[position[i]] += max(twice - step.workspace, 0)
    return int(live.max(initial=0))
