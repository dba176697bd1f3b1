"""A compiler that is a function, and families of variants for the search to choose from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from helpers import SHAPES, unit_costs

from vmem_jax import POLICIES
from vmem_jax.core.costs import Costs, Link
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import predicted_need
from vmem_jax.core.simulate import simulate
from vmem_jax.policy import AbstractPolicy, Keep
from vmem_jax.policy.base import Infeasible, Splitting
from vmem_jax.search.attempt import Found, Record, Tried
from vmem_jax.search.log import SearchLog
from vmem_jax.search.params import SearchParams
from vmem_jax.search.search import Search
from vmem_jax.search.variant import Family, Variant

PROGRAM = SHAPES["chain"]
STILL = unit_costs(PROGRAM)
"""Costs of a step that moves nothing: each of its steps takes a second."""
FAST = dataclasses.replace(STILL, link=Link(1e6, 1e6, 2e6))
"""The same with a link that hides every transfer."""
LOW = PROGRAM.resident_nbytes
HIGH = simulate(PROGRAM, range(len(PROGRAM.steps)), FAST).peak
BUDGET = (LOW + HIGH) // 2

Allow = Sequence[str]
MOVING: Allow = ("order", "recompute", "offload")
STAYING: Allow = ("order", "recompute")


def compiled(nbytes):
    """What a compiled step says of its memory."""
    stats = SimpleNamespace(
        argument_size_in_bytes=nbytes - 10,
        output_size_in_bytes=7,
        alias_size_in_bytes=2,
        temp_size_in_bytes=5,
    )
    return SimpleNamespace(memory_analysis=lambda: stats)


def auto(allow: Allow = MOVING) -> AbstractPolicy:
    return POLICIES["auto"](allow=allow)


def lowest_plan(policy: AbstractPolicy, costs: Costs = STILL) -> Plan:
    """The plan of `PROGRAM` with the lowest peak that `policy` knows."""
    failure = policy.plan(PROGRAM, costs, LOW + 1)
    assert isinstance(failure, Infeasible) and failure.plan is not None
    return failure.plan


class Compiler:
    """Compiles plans to `need(plan)` bytes, and notes which."""

    def __init__(self, need: Callable[[Plan], int] | None = None) -> None:
        self.need = need or (lambda plan: predicted_need(PROGRAM, plan))
        self.plans: list[Plan] = []

    def __call__(self, plan: Plan):
        self.plans.append(plan)
        return compiled(self.need(plan))


def over(excess: Callable[[Plan], int]) -> Compiler:
    """A compiler that needs so much more than predicted."""
    return Compiler(lambda plan: plan.predicted_peak + excess(plan))


class Recording(POLICIES["auto"]):
    """`auto`, which notes what it is asked for and what it plans."""

    def __init__(self, allow: Allow = MOVING) -> None:
        super().__init__(allow=allow)
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "made", [])

    def plan(self, program, costs, budget):
        plan = super().plan(program, costs, budget)
        self.asked.append((costs.link, budget))
        self.made.append(plan)
        return plan


def variant(
    compile_plan: Callable[[Plan], object] | None = None,
    policy: AbstractPolicy | None = None,
    costs: Costs = FAST,
    name: str = "auto",
    **changes,
) -> Variant:
    compiles = compile_plan or Compiler()
    origin = changes.pop("origin", compiles)
    return Variant(name, PROGRAM, policy or auto(), costs, compiles, origin, **changes)


def family(one: Variant, **changes) -> Family:
    """The family of one variant."""
    return Family((1,), lambda count: one, **changes)


def numbers(variants: Mapping[int, Variant], **changes) -> Family:
    """A family of some numbers of sub-batches."""
    return Family(tuple(variants), variants.__getitem__, **changes)


def untouched(compile_plan: Callable[[Plan], object]) -> Variant:
    return variant(compile_plan, Keep(), name="keep")


def find(
    *groups: Sequence[Family] | Variant,
    budget: int | None = BUDGET,
    log: SearchLog | None = None,
    without: Variant | None = None,
    plain_need: int | None = None,
    record: Record | None = None,
    may_stay: bool = False,
    **params,
) -> Found:
    """What the search finds; a group may be a variant alone.

    Args:
      without: the untouched program.
      params: of `SearchParams`.
    """
    made = [[family(g)] if isinstance(g, Variant) else g for g in groups]
    record = record or Record()
    if plain_need is not None:
        record.add(Tried(Keep().plan(PROGRAM, FAST, None), plain_need))
    given = SearchParams(**params), log or SearchLog(), record
    return Search(budget, without, may_stay, *given).run(made)


__all__ = [
    "BUDGET",
    "FAST",
    "HIGH",
    "LOW",
    "MOVING",
    "PROGRAM",
    "STAYING",
    "STILL",
    "Compiler",
    "Recording",
    "Splitting",
    "auto",
    "compiled",
    "family",
    "find",
    "lowest_plan",
    "numbers",
    "over",
    "untouched",
    "variant",
]
