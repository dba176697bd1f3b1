"""list_schedule: the order in which XLA:GPU runs the kernels of a plan without loops.

A barrier holds back what reads its results. What nothing holds back XLA:GPU runs when it sees fit:
of all kernels whose operands are there always the one that frees most beyond what it writes (list
scheduling: `ListScheduler` in XLA's hlo_memory_scheduler.cc). The worth of a kernel that is ready is
computed anew only where an operand of it gets its last reader. `core.run_order` has what XLA does
where there are loops.
"""

from __future__ import annotations

import heapq

from vmem_jax.core.instructions import Instructions

_SCALAR = (1 << 62, 1 << 62)
"""The worth of a kernel that makes one number: it runs as soon as it can."""


def list_order(graph: Instructions) -> list[int]:
    """The instructions of `graph` that there are, as list scheduling runs them."""
    outputs = {graph.value[b] for b in graph.program.outputs}
    alive = graph.alive()
    users: list[list[int]] = [[] for _ in graph.operands]
    left = [0] * len(graph.nbytes)  # readers of a value that have not run
    for v in outputs:
        left[v] += 1
    for i in alive:
        for o in graph.operands[i]:
            users[o].append(i)
        for v in graph.uses[i]:
            left[v] += 1
    waits = [len(operands) for operands in graph.operands]
    worth: dict[int, tuple[tuple[int, int], int]] = {}  # ready -> (worth, when that was found)
    queue: list[tuple[int, int, int, int]] = []
    ages = 0

    def worth_of(i: int) -> tuple[int, int]:
        if i in graph.scalars:
            return _SCALAR
        freed = sum(graph.nbytes[v] for v in graph.uses[i] if left[v] == 1 and v >= graph.arguments)
        return freed - graph.defined[i], len(users[i])

    def ready(i: int) -> None:
        nonlocal ages
        found = worth_of(i)
        if i not in worth or worth[i][0] != found:
            ages += 1  # of equals the latest runs first
            worth[i] = found, ages
            heapq.heappush(queue, (-found[0], -found[1], -ages, i))

    for i in alive:
        if not graph.operands[i]:
            ready(i)
    order: list[int] = []
    while queue:
        *_, age, i = heapq.heappop(queue)
        if i not in worth or worth[i][1] != -age:
            continue
        del worth[i]
        order.append(i)
        is_last = False
        for v in graph.uses[i]:
            left[v] -= 1
            is_last = is_last or left[v] == 1
        for u in users[i]:
            waits[u] -= 1
            if not waits[u]:
                ready(u)
        for o in graph.operands[i] if is_last else ():
            for u in users[o]:
                if u in worth:
                    ready(u)
    return order
