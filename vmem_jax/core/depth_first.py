"""depth_first: the two other orders of instructions that XLA tries beside list scheduling.

Both visit the operands of an instruction before it, from the results of the step backwards, each
instruction once (`DFSMemoryScheduler` and `PostOrderMemoryScheduler` in XLA's
hlo_memory_scheduler.cc). Post-order takes the operands as they stand. Depth-first takes first the one
on whose way most values are read more than once, and of equals the one that most bytes lead to. An
instruction counts once for each way to it, so both counts are capped, by the number of instructions
and by the bytes that all instructions so far in post-order make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vmem_jax.core.instructions import Instructions


def post_order(graph: Instructions) -> list[int]:
    """The instructions of `graph` that there are, in post-order."""
    return _visited(graph, lambda operands: operands)


def depth_first(graph: Instructions) -> list[int]:
    """The instructions of `graph` that there are, as XLA's depth-first order has them."""
    alive = post_order(graph)
    users = [0] * len(graph.operands)
    for i in alive:
        for o in graph.operands[i]:
            users[o] += 1
    extra, nbytes, total = [0] * len(users), [0] * len(users), 0
    for i in alive:
        if i < graph.arguments:
            continue
        total += graph.defined[i]
        operands = graph.operands[i]
        extra[i] = min(max(users[i] - 1, 0) + sum(extra[o] for o in operands), len(alive))
        nbytes[i] = min(graph.defined[i] + sum(nbytes[o] for o in operands), total)
    first = lambda operands: sorted(operands, key=lambda o: (-extra[o], -nbytes[o]))
    return _visited(graph, first)


def _visited(graph: Instructions, ordered: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
    """The instructions in post-order, of each its operands as `ordered` has them; first those that
    nothing takes, then the results of the step."""
    alive = graph.alive()
    taken = {o for i in alive for o in graph.operands[i]}
    results = list(dict.fromkeys(graph.node[b] for b in graph.program.outputs))
    unread = [i for i in alive if i not in taken and i not in results]
    order: list[int] = []
    state: dict[int, bool] = {}  # whether it is in `order`, of what was met
    stack = [*reversed([*unread, *ordered(results)])]
    while stack:
        i = stack[-1]
        if state.get(i):
            stack.pop()
        elif i in state:
            stack.pop()
            state[i] = True
            order.append(i)
        else:
            state[i] = False
            stack += [o for o in reversed(ordered(graph.operands[i])) if not state.get(o)]
    return order
