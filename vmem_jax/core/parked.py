"""parked: what a plan keeps in host memory of ours, a slot each, and when each slot is in use."""

from __future__ import annotations

from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.program import Program
from vmem_jax.core.schedule import Do, actions


def parked(program: Program, plan: Plan) -> tuple[Transfer, ...]:
    """The transfers of `plan` that need host memory of their own, in the order of their slots."""
    return tuple(t for t in plan.transfers if t.buffer not in program.hosted)


def parks(program: Program, plan: Plan) -> bool:
    """Whether `plan` needs host memory of its own."""
    return bool(parked(program, plan) or plan.looped)


def parked_spans(program: Program, plan: Plan) -> list[tuple[int, int]]:
    """For each slot the first and last position at which it is in use, by the schedule's events.

    The slots are those of `parked`, in use from the start of the copy out until the value is back,
    and then those of the looped stacks. The slot of a stack is in use from the loop that makes it to
    the end: the loop that reads it gives no token, so nothing may follow in its memory.
    """
    moving = {i for i, t in enumerate(plan.transfers) if t.buffer not in program.hosted}
    first: dict[int, int] = {}  # transfer, or step -> position
    last: dict[int, int] = {}
    made: dict[int, int] = {}
    for event in actions(program, plan.order, plan.transfers):
        if event.do is Do.RUN:
            made.setdefault(event.index, event.position)
        elif event.do is Do.START:
            first[event.index] = event.position
        elif event.do is Do.BACK:
            last[event.index] = event.position
    spans = [(first[i], last[i]) for i in sorted(moving)]
    return spans + [(made[program.producer[b]], len(plan.order)) for b in plan.looped]
