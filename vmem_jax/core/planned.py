"""planned: a Program and its Costs after a plan's changes to the steps themselves.

A plan may loop stacks (`core.looped`) and run convolutions in micro-batches. Both give another
Program, so `simulate`, `validate`, policies and reports need to know neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.costs import Costs
from vmem_jax.core.heap import heap_nbytes
from vmem_jax.core.looped import costs_with_looped, with_looped
from vmem_jax.core.params import PARAMS
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.program import Program
from vmem_jax.core.run_order import as_run, is_known
from vmem_jax.core.schedule import schedule
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.core.stated_layouts import left_to_xla, may_be_left

Convolutions = Iterable[tuple[int, Configuration]]
"""Steps, and the configurations that run in place of XLA's own convolutions."""


def planned_program(program: Program, plan: Plan) -> Program:
    """`program` with the looped stacks and configurations of `plan`."""
    return with_convolutions(with_looped(program, plan.looped), plan.convolutions)


def planned_costs(program: Program, plan: Plan, costs: Costs) -> Costs:
    """The costs of `planned_program`. `program` and `costs` are those that the plan was made from."""
    costs = costs_with_looped(program, plan.looped, costs)
    return costs_with_convolutions(plan.convolutions, costs)


def simulate_plan(program: Program, plan: Plan, costs: Costs) -> Timeline:
    """`simulate` of a whole plan. `program` and `costs` are those that it was made from."""
    costs = planned_costs(program, plan, costs)
    return simulate(planned_program(program, plan), plan.order, costs, plan.transfers)


def predicted_need(program: Program, plan: Plan) -> int:
    """Bytes of device memory that `plan` is predicted to compile to.

    A plan without fences runs in XLA's own order, so only its live bytes are known. `program` is the
    program that the plan was made from.
    """
    return _need_and_layouts(program, plan)[0]


def states_row_major(program: Program, plan: Plan) -> bool:
    """Whether `plan` states the layouts that it may leave to XLA (`core.stated_layouts`): its updates
    are faster so, and it does unless it needs more memory for that, or may where it moves values."""
    return _need_and_layouts(program, plan)[1]


def _need_and_layouts(program: Program, plan: Plan) -> tuple[int, bool]:
    """`predicted_need` and `states_row_major` of `plan`."""
    if not plan.fenced:
        return plan.predicted_peak, True
    # barriers are derived from the program as it was captured, as `rewrite` has them
    order: Sequence[int] = plan.order
    transfers = plan.transfers
    events = schedule(program, plan.order, transfers, looped=plan.looped)
    changed = planned_program(program, plan)
    is_run = is_known(program) and not transfers and not plan.looped
    if is_run:
        changed, events = as_run(changed, events, [s for s, _ in plan.convolutions])
        order, transfers = range(len(changed.steps)), ()
    stated = heap_nbytes(changed, order, transfers, events, is_run)
    optional = [w for step in program.steps if may_be_left(step) for w in step.writes]
    tolerated = PARAMS.row_major_part * stated
    if sum(program.buffers[b].nbytes for b in optional) <= tolerated:
        return stated, True  # no more than these are there twice
    left = heap_nbytes(left_to_xla(changed), order, transfers, events, is_run)
    most = stated
    if transfers and left >= stated - tolerated:  # what moves has to save memory, whatever XLA does
        most = heap_nbytes(changed, order, transfers, events, early=True)
    return (left, False) if left < most - tolerated else (stated, True)


def techniques_of(program: Program, plan: Plan) -> tuple[str, ...]:
    """What `plan` does to `program`, by the names that `jit(allow=…)` has for it.

    What is recomputed within loops (`Plan.kept`) is recomputed.
    """
    hosted = set(program.hosted)
    found = {
        "order": plan.fenced,
        "recompute": bool(plan.recomputed) or plan.kept is not None,
        "offload": bool(plan.looped) or any(t.buffer not in hosted for t in plan.transfers),
        "stream": program.is_streamed,
        "workspace": bool(plan.divided),
        "sub_batches": plan.sub_batches > 1 and not plan.opened,
        "bits": plan.bits,
        "compress": bool(plan.compressed),
    }
    return tuple(name for name, does in found.items() if does)


def restated(plan: Plan, costs: Costs) -> Plan:
    """`plan` with the workspaces that `costs` has for its convolutions, XLA's own included.

    Its predictions stay unchanged.
    """
    convolutions = dict(plan.convolutions)
    for s, front in costs.convolutions.items():
        calls = convolutions[s].calls if s in convolutions else front[0].calls
        convolutions |= ((s, each) for each in front if each.calls == calls)
    return dataclasses.replace(plan, convolutions=tuple(sorted(convolutions.items())))


def simulate_with(
    program: Program,
    order: Sequence[int],
    costs: Costs,
    convolutions: Convolutions,
    transfers: Sequence[Transfer] = (),
) -> Timeline:
    """`simulate` with `convolutions` in place of XLA's own."""
    convolutions = tuple(convolutions)
    costs = costs_with_convolutions(convolutions, costs)
    return simulate(with_convolutions(program, convolutions), order, costs, transfers)


def with_convolutions(program: Program, convolutions: Convolutions) -> Program:
    """`program` with the workspaces of `convolutions`."""
    steps = list(program.steps)
    for s, configuration in convolutions:
        steps[s] = dataclasses.replace(steps[s], workspace=configuration.workspace)
    return dataclasses.replace(program, steps=tuple(steps))


def costs_with_convolutions(convolutions: Convolutions, costs: Costs) -> Costs:
    """`costs` with the seconds of `convolutions`, by `costs` where it knows them."""
    seconds = list(costs.seconds)
    for s, configuration in convolutions:
        known = {each.calls: each for each in costs.convolutions.get(s, ())}
        seconds[s] = known.get(configuration.calls, configuration).seconds
    return dataclasses.replace(costs, seconds=tuple(seconds))
