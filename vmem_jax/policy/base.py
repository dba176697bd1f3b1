"""What a policy is: a pure function from a Program, its Costs and a budget to a Plan."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Mapping
from typing import ClassVar

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import planned_program
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline, live_at, nbytes_by_kind
from vmem_jax.errors import show_nbytes


class Splitting(enum.Enum):
    """In how many sub-batches a step runs where its user does not say.

    WHOLE: in one.
    FEWEST: the fewest with which a plan fits.
    FASTEST: as many as are predicted to be the fastest that fit.
    """

    WHOLE = enum.auto()
    FEWEST = enum.auto()
    FASTEST = enum.auto()


@dataclasses.dataclass(frozen=True)
class Infeasible:
    """What a policy returns for a budget that none of its plans meets.

    Attributes:
      policy: its name.
      budget: bytes.
      minimum_peak: bytes; the lowest predicted peak that it found.
      at: the user's layer and source line where that peak stands.
      holders: what holds the bytes there, for people.
      advice: what helps, for people; "" where only the usual remedies do.
      plan: the plan of that peak; None where no plan changes it.
    """

    policy: str
    budget: int
    minimum_peak: int
    at: str
    holders: str = ""
    advice: str = ""
    plan: Plan | None = None


class AbstractPolicy(abc.ABC):
    """Decides what to keep and what to recompute, and in which order.

    A policy touches nothing but its arguments and its own fields: no clock, no device, no random
    state. It returns a plan whose predicted peak is within the budget, or `Infeasible`.

    Class attributes:
      name: as in `POLICIES`.
      needs: techniques that are asked for where the user names none; without them it is not this
      policy.
      chooses_convolutions: whether it decides who does each convolution, of `Costs.convolutions`.
        For others `Convolving` does.
      compresses: whether all that it moves is compressed where the user asks for "compress". For
        others that is done where it is predicted to be a gain.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    chooses_convolutions: ClassVar[bool] = False
    compresses: ClassVar[bool] = False

    @property
    def splitting(self) -> Splitting:
        """In how many sub-batches steps run, where "sub_batches" is allowed. Each number of them is
        another Program, which `plan` is asked about."""
        return Splitting.WHOLE

    @property
    def instead(self) -> tuple[AbstractPolicy, ...]:
        """Policies that are asked where no plan of its own fits once it is compiled, or theirs may be
        enough faster."""
        return ()

    def spared(self, program: Program) -> str:
        """What of its search it leaves out for so long a program, for people; "" for nothing."""
        return ""

    def lower_bound_seconds(self, program: Program, costs: Costs, budget: int | None) -> float:
        """Seconds that no plan of its own goes below, as far as is known without one: where nothing
        runs again or waits, and each convolution takes its fastest configuration."""
        configurations = costs.convolutions
        fastest = lambda s: min([costs.seconds[s], *(c.seconds for c in configurations.get(s, ()))])
        return sum(map(fastest, range(len(program.steps))))

    @abc.abstractmethod
    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        """The plan for `program` within `budget` bytes (None: no limit, always a plan)."""


def finish(
    policy: str,
    program: Program,
    timeline: Timeline,
    budget: int | None,
    fenced: bool = True,
    looped: tuple[int, ...] = (),
    convolutions: Mapping[int, Configuration] | None = None,
) -> Plan | Infeasible:
    """The plan of `timeline`, or Infeasible if its peak is over `budget`.

    Args:
      program: without anything looped, and with XLA's own convolutions.
      timeline: with `looped` and `convolutions`.
    """
    plan = Plan(
        program=program.fingerprint,
        policy=policy,
        order=timeline.order,
        fenced=fenced,
        budget=budget,
        predicted_peak=timeline.peak,
        predicted_seconds=timeline.seconds,
        transfers=timeline.transfers,
        looped=looped,
        convolutions=tuple(sorted((convolutions or {}).items())),
        sub_batches=program.sub_batches,
        compressed=program.compressed,
        kept=program.kept,
    )
    if budget is not None and timeline.peak > budget:
        return infeasible(policy, planned_program(program, plan), timeline, budget, plan)
    return plan


def infeasible(
    policy: str, program: Program, timeline: Timeline, budget: int, lowest: Plan
) -> Infeasible:
    """What to say of a budget that `timeline`, the lowest of `policy`, does not meet.

    Args:
      program: as `lowest` has it, with what it loops and divides.
    """
    holders, advice = what_holds(program, timeline), ""
    if program.resident_nbytes > budget:
        holders, advice = arguments_and_outputs(program), ARGUMENTS_ADVICE
    return Infeasible(
        policy=policy,
        budget=budget,
        minimum_peak=max(timeline.peak, program.resident_nbytes),
        at=where_peak(program, timeline),
        holders=holders,
        advice=advice,
        plan=lowest,
    )


ARGUMENTS_ADVICE = (
    "No plan can free the arguments and outputs. Donate the state (`donate_argnums`), use a smaller "
    "dtype or model, or a larger `budget`."
)
"""What helps where the arguments and outputs are over the budget."""


def arguments_and_outputs(program: Program) -> str:
    """For people: what the arguments and outputs take, and the largest."""
    largest = max({*program.inputs, *program.outputs}, key=lambda b: program.buffers[b].nbytes)
    return (
        f"arguments and outputs alone take {show_nbytes(program.resident_nbytes)}; the largest is "
        f"{program.buffers[largest].label}, {show_nbytes(program.buffers[largest].nbytes)}"
    )


def where_peak(program: Program, timeline: Timeline) -> str:
    if timeline.peak_at < 0:
        return "the arguments and outputs alone"
    return program.steps[timeline.order[timeline.peak_at]].where


def what_holds(program: Program, timeline: Timeline) -> str:
    """For people: bytes by kind at the peak, the workspace there, and the largest buffers."""
    order, position = timeline.order, timeline.peak_at
    if position < 0:
        return ""
    live = live_at(program, order, position, timeline.transfers)
    kinds = [f"{k.value} {show_nbytes(n)}" for k, n in nbytes_by_kind(program, live).items()]
    kinds.append(f"arguments and outputs {show_nbytes(program.resident_nbytes)}")
    if workspace := program.steps[order[position]].workspace:
        kinds.append(f"workspace {show_nbytes(workspace)}")
    largest = sorted(live, key=lambda b: -program.buffers[b].nbytes)[:3]
    names = [
        f"{program.buffers[b].label} {show_nbytes(program.buffers[b].nbytes)}" for b in largest
    ]
    return ", ".join(kinds) + ("; largest: " + ", ".join(names) if names else "")
