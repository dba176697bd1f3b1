"""convolving: chooses the configuration of each convolution, for any policy that plans the rest.

A workspace is live only while its step runs, so its limit is what is free at that step. SuperNeurons
(Wang et al., PPoPP 2018, section 3.5) and moDNN (Chen et al., DATE 2018, eq. 5) give each convolution
the fastest algorithm that fits there. What is free depends on what is recomputed and moved. So the
policy plans the rest several times, each time with all workspaces limited by another cap, from the
smallest possible to none; then each convolution gets the fastest configuration that fits at its step,
and the fastest plan wins.

The plan with the smallest workspaces leaves the rest the most memory. Its seconds, with every
convolution at its fastest, serve as a lower bound; a plan close to it ends the search. XLA's own
convolutions are kept, if they fit, unless the gain is more than predictions are off.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import costs_with_convolutions, simulate_plan, with_convolutions
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline
from vmem_jax.policy.base import AbstractPolicy, Infeasible

Configurations = Mapping[int, Sequence[Configuration]]


@dataclasses.dataclass(frozen=True)
class Convolving(AbstractPolicy):
    """`inner` with a configuration of `Costs.convolutions` for each convolution.

    Attributes:
      inner: the policy that plans the rest.
      caps: limits of workspace to try between the smallest possible and none, as shares of the budget
        without arguments and outputs.
      close: a plan within this factor of the first one with the fastest convolutions ends the search.
      gain: a plan must be faster by this share than one with XLA's own convolutions, if both fit.
    """

    name: ClassVar[str] = "convolving"
    inner: AbstractPolicy
    caps: tuple[float, ...] = (0.05, 0.2)
    close: float = 1.001
    gain: float = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.inner.name)  # errors speak of the user's policy

    def spared(self, program: Program) -> str:
        return self.inner.spared(program)

    def lower_bound_seconds(self, program: Program, costs: Costs, budget: int | None) -> float:
        """The bound of `inner` if every convolution had its fastest time and smallest workspace."""
        program = with_convolutions(program, smallest_workspaces(costs.convolutions).items())
        costs = costs_with_convolutions(fastest(costs.convolutions).items(), costs)
        return self.inner.lower_bound_seconds(program, costs, budget)

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        """The plan of `inner` with configurations of its convolutions, under the name of `inner`."""
        configurations = costs.convolutions
        if not configurations:
            return self.inner.plan(program, costs, budget)
        held = self._held(program, configurations, budget)

        @functools.cache  # XLA's own may be among those held
        def planned(chosen: tuple[tuple[int, Configuration], ...]) -> Plan | Infeasible:
            seconds = costs_with_convolutions(chosen, costs)
            return self.inner.plan(with_convolutions(program, chosen), seconds, budget)

        xlas = {s: each[0] for s, each in configurations.items()}
        found = planned((*xlas.items(),))
        own = None if isinstance(found, Infeasible) else _with(program, costs, found, xlas)
        enough = 0.0 if own is None else (1 - self.gain) * own.predicted_seconds
        if own and enough <= self.lower_bound_seconds(program, costs, budget):
            return own
        best: Plan | None = None
        fastest_seconds: float | None = None
        failures: list[tuple[Infeasible, dict[int, Configuration]]] = []
        for chosen in held:
            plan = planned((*chosen.items(),))
            if isinstance(plan, Infeasible):
                failures.append((plan, chosen))
                continue
            if fastest_seconds is None:
                fastest_seconds = simulate_plan(program, _choosing(plan, held[-1]), costs).seconds
            plan = _with(program, costs, plan, _raised(program, costs, plan, chosen, budget))
            if best is None or plan.predicted_seconds < best.predicted_seconds:
                best = plan
            if best.predicted_seconds <= self.close * fastest_seconds:
                break
        if best is None:
            return own or _lowest(program, costs, failures)
        return best if own is None or best.predicted_seconds < enough else own

    def _held(
        self, program: Program, configurations: Configurations, budget: int | None
    ) -> list[dict[int, Configuration]]:
        """The first choices, each once: from the smallest workspaces to the fastest."""
        if budget is None:
            return [fastest(configurations)]
        lowest = smallest_workspaces(configurations)
        found = [lowest]
        free = max(budget - program.resident_nbytes, 0)
        for share in self.caps:
            fitting = {
                s: [c for c in each if c.workspace <= share * free] or [lowest[s]]
                for s, each in configurations.items()
            }
            found.append({s: min(each, key=_by_seconds) for s, each in fitting.items()})
        found.append(fastest(configurations))
        return [chosen for i, chosen in enumerate(found) if chosen not in found[:i]]


def _lowest(
    program: Program,
    costs: Costs,
    failures: Sequence[tuple[Infeasible, dict[int, Configuration]]],
) -> Infeasible:
    """The failure with the lowest peak, with the fastest convolutions that keep that peak."""
    lowest, chosen = min(failures, key=lambda failure: failure[0].minimum_peak)
    low = _with(program, costs, lowest.plan, chosen)
    faster = _raised(program, costs, low, chosen, low.predicted_peak)
    return dataclasses.replace(lowest, plan=_with(program, costs, low, faster))


def _raised(
    program: Program,
    costs: Costs,
    plan: Plan,
    chosen: dict[int, Configuration],
    limit: int | None,
) -> dict[int, Configuration]:
    """`chosen`, with the fastest configuration that fits within `limit` wherever its step runs."""
    if limit is None:
        return chosen
    timeline = simulate_plan(program, _choosing(plan, chosen), costs)
    return fastest_fitting(costs.convolutions, timeline, chosen, limit)


def smallest_workspaces(configurations: Configurations) -> dict[int, Configuration]:
    """For each convolution the configuration of the smallest workspace."""
    return {s: min(each, key=_by_workspace) for s, each in configurations.items()}


def fastest(configurations: Configurations) -> dict[int, Configuration]:
    """For each convolution the fastest, whatever its workspace."""
    return {s: min(each, key=_by_seconds) for s, each in configurations.items()}


def fastest_fitting(
    configurations: Configurations,
    timeline: Timeline,
    chosen: Mapping[int, Configuration],
    budget: int,
) -> dict[int, Configuration]:
    """For each convolution, the fastest configuration that fits in `budget` wherever its step runs.

    Args:
      timeline: the timeline of a plan with `chosen`, which tells what else is live.
    """
    room: dict[int, int] = {}
    for s, live in zip(timeline.order, timeline.live_nbytes, strict=True):
        if s in chosen:
            free = budget - live + chosen[s].workspace
            room[s] = min(free, room.get(s, free))
    found = {}
    for s, each in configurations.items():
        limit = max(room[s], chosen[s].workspace)
        found[s] = min(
            (c for c in each if c.workspace <= limit),
            key=_by_seconds,
        )
    return found


def _with(program: Program, costs: Costs, plan: Plan, chosen: dict[int, Configuration]) -> Plan:
    """`plan` with `chosen`, and its predictions."""
    plan = _choosing(plan, chosen)
    timeline = simulate_plan(program, plan, costs)
    return dataclasses.replace(
        plan, predicted_peak=timeline.peak, predicted_seconds=timeline.seconds
    )


def _choosing(plan: Plan, chosen: dict[int, Configuration]) -> Plan:
    """`plan` with `chosen`, and its old predictions."""
    divides = any(not c.is_xlas for c in chosen.values())
    return dataclasses.replace(
        plan, convolutions=tuple(sorted(chosen.items())), fenced=plan.fenced or divides
    )


def _by_workspace(configuration: Configuration) -> tuple[float, float]:
    return configuration.workspace, configuration.seconds


def _by_seconds(configuration: Configuration) -> tuple[float, float]:
    return configuration.seconds, configuration.workspace
