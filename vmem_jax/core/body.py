"""body: the bytes that one iteration of a loop takes for values of its own, and what loops carry."""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax.core.program import Program, Step


def body_nbytes(program: Program, carried: int | None = None) -> int:
    """The most bytes that are live at once among the values that `program` makes, the body of a loop,
    with its steps in their order.

    A result waits for the end of the iteration. What a step makes in the place of an operand that
    dies there takes nothing, and neither does a stack that it writes a slice of, or what a loop in it
    carries and nothing else reads. A fused kernel writes a result for a stack alone into that stack,
    unless it normalises rows (`Step.normalises`).

    Args:
      carried: how many of the outputs are carried into the next iteration; the others are stacked.
        None for all.
    """
    stacked = frozenset[int]() if carried is None else _written_to_stacks(program, carried)
    pairs = [_in_place(program, s) for s in range(len(program.steps))]
    owner: dict[int, int] = {}  # of what is a stack that is written to, or went through a barrier

    def own(b: int) -> int:
        return owner.get(b, b)

    read_last = {b: s for s, step in enumerate(program.steps) for b in step.reads}
    read_last.update(dict.fromkeys(program.outputs, len(program.steps)))
    for s, (step, same) in enumerate(zip(program.steps, pairs, strict=True)):
        if step.op in ("optimization_barrier", "dynamic_update_slice"):
            owner.update((w, own(r)) for r, w in same)
        elif step.op == "scan":
            owner.update((w, own(r)) for r, w in same if read_last[r] == s)
    last = {own(b): s for s, step in enumerate(program.steps) for b in step.reads}
    last.update((own(b), len(program.steps)) for b in program.outputs)
    size = lambda buffers: sum(program.buffers[b].nbytes for b in buffers)
    made: set[int] = set()
    live = peak = 0
    for s, (step, same) in enumerate(zip(program.steps, pairs, strict=True)):
        dying = {own(b) for b in step.reads if own(b) in made and last[own(b)] == s}
        reusable = set(dying)
        new = [w for w in step.writes if own(w) == w and w not in stacked]
        for w in new:
            # what is read through a barrier is not written over
            given = (own(r) for r, x in same if x == w and r not in owner)
            reused = next((r for r in given if r in reusable), None)
            if reused is None:
                live += program.buffers[w].nbytes
            else:
                reusable.discard(reused)
        peak = max(peak, live + step.workspace)
        made.update(new)
        unread = {w for w in new if w not in last}
        live -= size(reusable | unread)
        made -= dying | unread
    return peak


def _written_to_stacks(program: Program, carried: int) -> frozenset[int]:
    """The outputs behind the first `carried` ones that fused kernels make and nothing reads."""
    used = {b for step in program.steps for b in step.reads}.union(program.outputs[:carried])
    kernels = [step for step in program.steps if step.fusible and not step.normalises]
    made = {b for step in kernels for b in step.writes}
    return frozenset(made.intersection(program.outputs[carried:]) - used)


def _in_place(program: Program, s: int) -> tuple[tuple[int, int], ...]:
    step = program.steps[s]
    if step.op == "optimization_barrier" and len(step.reads) == len(step.writes):
        return tuple(zip(step.reads, step.writes, strict=True))
    return step.in_place


def carried_into_results(steps: Sequence[Step], inputs: int, outputs: set[int]) -> set[int]:
    """The buffers that only exist to be carried by loops until they are results of the step: they are
    where these will be, and take nothing beside them."""
    readers: dict[int, int] = {}
    for step in steps:
        for b in step.reads:
            readers[b] = readers.get(b, 0) + 1
    found: set[int] = set()
    for step in reversed(steps):
        if step.op == "scan":
            same = [r for r, w in step.in_place if w in outputs or w in found]
            found.update(r for r in same if inputs <= r and readers[r] == 1 and r not in outputs)
    return found
