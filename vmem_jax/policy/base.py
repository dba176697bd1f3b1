"""AbstractPolicy: a pure function from a Program, its Costs and a budget to a Plan."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import planned_program
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline, live_at, nbytes_by_kind
from vmem_jax.core.stays import live_during
from vmem_jax.errors import show_nbytes
from vmem_jax.policy.workspace_reuse import BatchSizes


class Splitting(enum.Enum):
    """How the number of sub-batches is chosen if the user does not give it.

    WHOLE: the batch stays whole.
    FEWEST: the fewest sub-batches with which a plan fits.
    FASTEST: the number that is predicted to be fastest among those that fit.
    """

    WHOLE = enum.auto()
    FEWEST = enum.auto()
    FASTEST = enum.auto()


@dataclasses.dataclass(frozen=True)
class Infeasible:
    """The result of a policy for a budget that none of its plans meets.

    Attributes:
      policy: the name of the policy.
      budget: bytes.
      minimum_peak: the lowest predicted peak that was found, in bytes.
      at: the user's layer and source line of that peak.
      holders: what holds the bytes there, for people, a line each.
      lacks: what the step lacks for the policy to do more than that, for people; "" for nothing.
      plan: the plan with that peak.
    """

    policy: str
    budget: int
    minimum_peak: int
    at: str
    holders: str = ""
    lacks: str = ""
    plan: Plan = dataclasses.field(kw_only=True)


class AbstractPolicy(abc.ABC):
    """Decides what to keep, recompute and move, and in which order the steps run.

    A policy depends on nothing but its arguments and its own fields: no clock, no device, no random
    state. It returns a plan whose predicted peak is within the budget, or `Infeasible`.
    docs/contributing.md has an example.

    Class attributes:
      name: its name in `POLICIES`.
      needs: techniques without which it is not this policy; choosing it allows them.
      chooses_convolutions: whether it chooses a configuration of `Costs.convolutions` for each
        convolution. For other policies `Convolving` chooses.
      compresses: whether everything that it moves is compressed if the user names "compress". For
        other policies values are compressed where that is predicted to be a gain.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    chooses_convolutions: ClassVar[bool] = False
    compresses: ClassVar[bool] = False

    @property
    def micro_batches(self) -> BatchSizes:
        """The sizes of micro-batches that it is offered on a CPU, where they are not timed."""
        return BatchSizes.POWER_OF_TWO

    @property
    def splitting(self) -> Splitting:
        """How the number of sub-batches is chosen, if "sub_batches" is allowed. Each number gives
        another Program, and `plan` is called for each."""
        return Splitting.WHOLE

    @property
    def caches(self) -> bool:
        """Whether what the budget leaves holds, as a tensor cache, what would otherwise move."""
        return False

    @property
    def instead(self) -> tuple[AbstractPolicy, ...]:
        """Policies that are asked too, if no plan of this one fits when compiled, or if their plans
        may be faster by a tolerance."""
        return ()

    def spared(self, program: Program) -> str:
        """The parts of its search that it skips for a program of this length, for people; "" for
        none."""
        return ""

    def lower_bound_seconds(self, program: Program, costs: Costs, budget: int | None) -> float:
        """A lower bound of the seconds of its plans: no step runs twice or waits, and each
        convolution has its fastest configuration."""
        configurations = costs.convolutions
        fastest = lambda s: min([costs.seconds[s], *(c.seconds for c in configurations.get(s, ()))])
        return sum(map(fastest, range(len(program.steps))))

    @abc.abstractmethod
    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        """The plan for `program` within `budget` bytes; without a budget (None) always a plan."""


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
      program: the program before `looped` and `convolutions` are applied.
      timeline: the simulation with them.
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
        segments=program.segments,
        opened=program.opened,
        logit_chunks=program.logit_chunks,
        carried=program.carried,
        summed=program.summed,
        pooled=program.pooled,
        row_kernels=program.row_kernels,
        bits=program.bits,
        sub_batch_size=program.sub_batch_size,
    )
    if budget is not None and timeline.peak > budget:
        return infeasible(policy, planned_program(program, plan), timeline, budget, plan)
    return plan


def infeasible(
    policy: str, program: Program, timeline: Timeline, budget: int, lowest: Plan
) -> Infeasible:
    """The result for a budget that `timeline`, the lowest one of `policy`, does not meet.

    Args:
      program: the program with the looped stacks and convolutions of the plan `lowest`.
    """
    over = program.resident_nbytes > budget
    holders = arguments_and_outputs(program) if over else at_the_peak(program, timeline)
    return Infeasible(
        policy=policy,
        budget=budget,
        minimum_peak=max(timeline.peak, program.resident_nbytes),
        at=where_peak(program, timeline),
        holders=holders,
        plan=lowest,
    )


def arguments_and_outputs(program: Program) -> str:
    """For people: the bytes of the arguments, outputs and constants, and the largest of them."""
    ids = {*program.inputs, *program.outputs}
    constants = program.resident_nbytes > program.arguments_nbytes
    what = "arguments, outputs and constants" if constants else "arguments and outputs"
    total = f"{what} alone take {show_nbytes(program.resident_nbytes)}"
    return _with_largest(total, program, ids)


def at_the_peak(program: Program, timeline: Timeline) -> str:
    """For people, a line each: bytes by kind at the peak, and the largest values with their lines."""
    if timeline.peak_at < 0:
        return ""
    live = live_at(program, timeline.order, timeline.peak_at, timeline.transfers)
    return _with_largest(", ".join(_kinds(program, timeline, live)), program, live)


def _with_largest(text: str, program: Program, ids: Collection[int], count: int = 3) -> str:
    """`text`, and the largest of the buffers `ids`, each with its size and where it is made."""
    if not ids:
        return text
    lines = [f"{text}; the largest:"]
    for b in sorted(ids, key=lambda b: (-program.buffers[b].nbytes, b))[:count]:
        buffer, made = program.buffers[b], program.producer[b]
        where = f", made at {program.steps[made].where}" if made >= 0 else ""
        lines.append(f"  {show_nbytes(buffer.nbytes):>10}  {buffer.label}{where}")
    return "\n".join(lines)


def where_peak(program: Program, timeline: Timeline) -> str:
    if timeline.peak_at < 0:
        return "the arguments and outputs alone"
    return program.steps[timeline.order[timeline.peak_at]].where


def what_holds(program: Program, timeline: Timeline) -> str:
    """For people: bytes by kind at the peak, the workspace there, and the largest buffers."""
    if timeline.peak_at < 0:
        return ""
    live = live_during(program, timeline, timeline.peak_at)
    kinds = _kinds(program, timeline, live)
    largest = sorted(live, key=lambda b: -program.buffers[b].nbytes)[:3]
    names = [
        f"{program.buffers[b].label} {show_nbytes(program.buffers[b].nbytes)}" for b in largest
    ]
    return ", ".join(kinds) + ("; largest: " + ", ".join(names) if names else "")


def _kinds(program: Program, timeline: Timeline, live: Sequence[int]) -> list[str]:
    """Bytes by kind of the buffers `live` at the peak, and the workspace there."""
    kinds = [f"{k.value} {show_nbytes(n)}" for k, n in nbytes_by_kind(program, live).items()]
    kinds.append(f"arguments and outputs {show_nbytes(program.resident_nbytes)}")
    if workspace := program.steps[timeline.order[timeline.peak_at]].workspace:
        kinds.append(f"workspace {show_nbytes(workspace)}")
    return kinds
