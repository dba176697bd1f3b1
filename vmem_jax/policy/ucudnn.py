"""ucudnn: convolutions in micro-batches within a limit of workspace, and nothing else.

Source: Oyama et al., "µ-cuDNN: Accelerating Deep Learning Frameworks with Micro-Batching", CLUSTER
2018, arXiv:1804.04806. Workspace reuse (WR, III-B) gives each convolution the fastest configuration
within a limit of its own (`workspace_reuse`); workspace division (WD, III-C) divides one limit among
all of them by an integer program (`workspace_division`). Which micro-batches there are says the
batch-size policy (III-D).

Differs from the paper:
1. Where no limit is given it follows from the budget: what that leaves beside the peak of the step
   without workspaces (WD), or the largest for which the step fits (WR). The order is the traced one
   then, also where nothing is divided.
2. A workspace is there only while its convolution runs, also with WD, whose limit is for all of them
   together as if they lay side by side. So plans of WD take less than they are allowed, and where
   even the smallest workspaces are over what the budget leaves, each takes its smallest.
3. What can be chosen is `Costs.convolutions`: the desirable sets of what was timed. The batch-size
   policy takes those of other micro-batches out; it does not time more. On a CPU, where nothing is
   timed, it says which there are.
4. cuDNN alone is asked in the paper. Here XLA's own convolution, whole, is one of the
   configurations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import simulate_with
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline
from vmem_jax.errors import WorkspaceError, parse_size
from vmem_jax.policy.base import AbstractPolicy, Infeasible, finish
from vmem_jax.policy.option_checks import check_choice
from vmem_jax.policy.workspace_division import Choice, desirable, divide
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes

Fronts = Mapping[int, Choice]
OPTIMISATIONS = ("wr", "wd")


@dataclasses.dataclass(frozen=True)
class UCuDNN(AbstractPolicy):
    """Chooses the configuration of each convolution, in the traced order.

    Attributes:
      optimisation: "wr" for a limit of each convolution, "wd" for one limit of all together.
      limit: bytes of workspace, or a size such as "64MiB"; None to compute it from the budget.
      batch_sizes: the sizes of micro-batches that may be used.

    Raises:
      ValueError: `optimisation` or `batch_sizes` is unknown, or `limit` is not positive.
      TypeError: `limit` is neither bytes nor a size.
    """

    name: ClassVar[str] = "ucudnn"
    needs: ClassVar[tuple[str, ...]] = ("workspace",)
    chooses_convolutions: ClassVar[bool] = True
    optimisation: str = "wd"
    limit: int | str | None = None
    batch_sizes: BatchSizes = BatchSizes.POWER_OF_TWO

    @property
    def micro_batches(self) -> BatchSizes:
        return self.batch_sizes

    def __post_init__(self) -> None:
        check_choice("optimisation", self.optimisation, OPTIMISATIONS)
        check_choice("batch_sizes", self.batch_sizes, [*map(str, BatchSizes)])
        object.__setattr__(self, "batch_sizes", BatchSizes(self.batch_sizes))  # its name will do
        if self.limit is not None:
            object.__setattr__(self, "limit", parse_size(self.limit, "limit"))

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        """The plan of the traced order with the chosen configurations.

        Raises:
          WorkspaceError: `limit` is less than the smallest workspaces.
        """
        fronts = {
            s: allowed(configurations, self.batch_sizes)
            for s, configurations in costs.convolutions.items()
        }
        chosen = self._chosen(program, costs, fronts, budget)
        # in XLA's own order the peak of the untouched step is not known, so it meets no budget
        fenced = budget is not None or any(not c.is_xlas for c in chosen.values())
        timeline = _traced(program, costs, chosen)
        return finish(self.name, program, timeline, budget, fenced, convolutions=chosen)

    def _chosen(
        self, program: Program, costs: Costs, fronts: Fronts, budget: int | None
    ) -> dict[int, Configuration]:
        if self.limit is not None:
            limit = parse_size(self.limit, "limit")
            wr = self.optimisation == "wr"
            return reused(program, fronts, limit) if wr else divided(fronts, limit)
        if budget is None:
            return {s: each[-1] for s, each in fronts.items()}
        smallest = {s: each[0] for s, each in fronts.items()}
        if self.optimisation == "wd":
            nothing = {s: Configuration(()) for s in fronts}
            free = budget - _traced(program, costs, nothing).peak
            return divided(fronts, free) if _nbytes(smallest) <= free else smallest
        limits = sorted({c.workspace for each in fronts.values() for c in each})
        limits = [
            n for n in limits if n >= max((w.workspace for w in smallest.values()), default=0)
        ]
        chosen = smallest
        low, high = 0, len(limits)  # all before `low` fit, none from `high` on does
        while low < high:
            middle = (low + high) // 2
            found = reused(program, fronts, limits[middle])
            if _traced(program, costs, found).peak <= budget:
                low, chosen = middle + 1, found
            else:
                high = middle
        return chosen


def allowed(choice: Choice, policy: BatchSizes) -> Choice:
    """The desirable set of those of `choice` whose micro-batches `policy` has; the whole is one."""
    sizes = set(batch_sizes(choice[0].batch, policy))
    return desirable(c for c in choice if all(m.batch in sizes for m in c.micros))


def reused(program: Program, fronts: Fronts, limit: int) -> dict[int, Configuration]:
    """For each convolution the fastest within `limit` bytes (WR).

    Raises:
      WorkspaceError: for one of them none is.
    """
    found = {}
    for s, each in fronts.items():
        within = [c for c in each if c.workspace <= limit]
        if not within:
            what = program.steps[s].where
            raise WorkspaceError(what=what, limit=limit, least=each[0].workspace)
        found[s] = within[-1]
    return found


def divided(fronts: Fronts, limit: int) -> dict[int, Configuration]:
    """For each convolution one of its desirable set, all within `limit` bytes together (WD).

    Raises:
      WorkspaceError: not even the smallest are.
    """
    steps = sorted(fronts)
    if not steps:
        return {}
    return dict(zip(steps, divide([fronts[s] for s in steps], limit), strict=True))


def _traced(program: Program, costs: Costs, chosen: Mapping[int, Configuration]) -> Timeline:
    return simulate_with(program, range(len(program.steps)), costs, chosen.items())


def _nbytes(chosen: Mapping[int, Configuration]) -> int:
    return sum(c.workspace for c in chosen.values())
