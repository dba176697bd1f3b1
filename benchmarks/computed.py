"""Tables of the papers that are calculations: nothing is compiled or run for them.

A step is traced and captured, and a policy plans it by an H200's roofline; what is counted follows
from the plan. Convolutions have no workspaces there, so modes are those with the least memory (m).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from manifest import Case, Table
from variants import policy_of

import vmem_jax
from vmem_jax import VDNN, MoDNN
from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import Costs, analytic
from vmem_jax.core.plan import Plan
from vmem_jax.core.pool import Allocate, fragmentation, requests_of
from vmem_jax.core.program import Kind, Program
from vmem_jax.core.simulate import simulate
from vmem_jax.core.tensor_cache import events_of, traffic
from vmem_jax.models import job
from vmem_jax.policy import Auto, Infeasible
from vmem_jax.policy.layerwise import Walk
from vmem_jax.policy.sub_batch import Task, lower_bound
from vmem_jax.policy.superneurons import STRATEGIES, SuperNeurons, moving, recomputing, routed
from vmem_jax.rewrite.transfers import layout_of

CARD = "h200"
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Cell:
    """One calculated figure; fields as those of `manifest.Published`."""

    of: str
    how: str
    what: str
    value: float
    unit: str


@functools.cache
def captured(model: str, batch: int, dtype: str) -> Program:
    """The Program of a train step; the state is donated."""
    work = job(model, batch=batch, dtype=dtype)
    shapes = work.state_shapes(), work.batch
    states = len(jax.tree.leaves(shapes[0]))
    inputs = len(jax.tree.leaves(shapes))
    donated = [i < states for i in range(inputs)]
    return capture(jax.jit(work.step).trace(*shapes).jaxpr, donated=donated).program


def planned(case: Case) -> tuple[Program, Costs, Plan]:
    """The plan of a case without a budget, by the roofline of CARD."""
    program = captured(case.model, case.batch, case.dtype)
    costs = analytic(program, CARDS[CARD].machine)
    policy = policy_of(case.variant)
    policy = vmem_jax.POLICIES[policy]() if isinstance(policy, str) else policy
    return program, costs, policy.plan(program, costs, None)


def pools(table: Table) -> list[Cell]:
    """vDNN++, Tables II and V: what is live at most, and the pools that serve it (IV-B).

    Arguments and outputs lie elsewhere and are not counted, which the paper's are. `dyn` without a
    budget moves nothing.
    """
    found = []
    for case in table.cases:
        program, _, plan = planned(case)
        served = fragmentation(program, plan.order, plan.transfers)
        own = functools.partial(_mib, case.network, case.variant)
        found.append(own("aggregate", served.aggregate))
        for (first, heuristic), nbytes in served.pools.items():
            order = "prefetch first" if first else "derivative first"
            found.append(own(f"{order}, {heuristic.value}", nbytes))
        pinned = sum(program.buffers[t.buffer].nbytes for t in plan.transfers)
        found.append(own("pinned", pinned))
    return found


def lower_bounds(table: Table) -> list[Cell]:
    """moDNN, Figure 6: all data of a step at once, and the bound of equation 2.

    What grows with the batch follows from two batches. Weights and their gradients stay.
    """
    found = []
    for network, dtype in dict.fromkeys((c.network, c.dtype) for c in table.cases):
        model, batch = network.split(":")
        tasks, weights, everything = _by_sample(
            captured(model, 2, dtype), captured(model, 4, dtype), int(batch)
        )
        bound = lower_bound(tasks, int(batch), weights)
        found.append(_mib(network, "", "ideal", weights + everything))
        found.append(_mib(network, "", "lower bound", bound))
        found.append(Cell(network, "", "reduction", (weights + everything) / bound, "times"))
    return found


def _by_sample(two: Program, four: Program, batch: int) -> tuple[list[Task], int, int]:
    """Tasks of `batch` samples, bytes of weights and their gradients, and of all that grows.

    Raises:
      ValueError: `two` and `four`, of so many samples, are not the same step.
    """
    if [s.op for s in two.steps] != [s.op for s in four.steps]:
        raise ValueError(f"{two.fingerprint} and {four.fingerprint} are different steps")
    pairs = zip(two.buffers, four.buffers, strict=True)
    growing = [(after.nbytes - before.nbytes) // 2 for before, after in pairs]
    tasks = [Task(batch * sum(growing[b] for b in {*s.reads, *s.writes})) for s in two.steps]
    parameters = (b for b in two.inputs if two.buffers[b].kind is Kind.PARAMETER)
    return tasks, 2 * sum(two.buffers[b].nbytes for b in parameters), batch * sum(growing)


def moved(table: Table) -> list[Cell]:
    """moDNN, Figure 7: bytes moved by vDNN and by moDNN, with the batch as a whole.

    By a roofline, in the paper's 12 GB and in a share of the peak without transfers. The last cells
    are means over the networks of which vDNN moves something.
    """
    found = []
    dtype = "float32"
    for budget in ("12GiB", 0.95, 0.9):
        ratios = []
        of_budget = budget if isinstance(budget, str) else f"{budget:.0%} of the peak"
        for network in dict.fromkeys(c.network for c in table.cases if c.dtype == dtype):
            model, batch = network.split(":")
            program = captured(model, int(batch), dtype)
            costs = analytic(program, CARDS[CARD].machine)
            free = MoDNN().plan(program, costs, None)
            limit = 12 * 2**30 if isinstance(budget, str) else int(budget * free.predicted_peak)
            nbytes = []
            for policy in (VDNN(), MoDNN()):
                plan = policy.plan(program, costs, limit)
                nbytes.append(sum(program.buffers[t.buffer].nbytes for t in plan.transfers))
                found.append(_mib(network, of_budget, policy.name, nbytes[-1]))
            if nbytes[0]:
                ratios.append(nbytes[0] / nbytes[1])
        mean = sum(ratios) / len(ratios)
        found.append(Cell("mean", of_budget, "vdnn over modnn", mean, "times"))
    return found


def techniques(table: Table) -> list[Cell]:
    """SuperNeurons, Figure 10: AlexNet layer by layer, as the paper draws it."""
    del table
    drawn = _drawings().alexnet()
    program, costs = drawn.program, drawn.costs({}, rate=1e9)
    order = tuple(range(len(program.steps)))
    walk = Walk(program, order)
    own = functools.partial(_mib, "AlexNet, 200")
    again = recomputing(program, costs, walk, order, "cost-aware")
    return [
        own("liveness", "peak", simulate(program, order, costs).peak),
        own("and offloading", "peak", moving(program, costs, walk, order).peak),
        own("and recomputation", "peak", moving(program, costs, walk, again).peak),
        own("the largest layer", "peak", 4 * program.buffers[drawn.y[0]].nbytes),
    ]


def recomputations(table: Table) -> list[Cell]:
    """SuperNeurons, Table 1: the networks layer by layer, and ResNets as our steps have them.

    The paper does not say of which batch its peaks of ResNets are; these are of 32 images.
    """
    del table
    drawings = _drawings()
    found = []
    for of, drawn in (
        ("AlexNet", drawings.alexnet()),
        ("ResNet50", drawings.network(drawings.resnet((3, 4, 6, 3)), batch=0)),
        ("ResNet101", drawings.network(drawings.resnet((3, 4, 23, 3)), batch=0)),
    ):
        order = tuple(range(len(drawn.program.steps)))
        found += _strategies(of, drawn.program, drawn.costs({}, rate=1e9), order)
    for model in ("resnet50", "resnet101"):
        program = captured(model, 32, "float32")
        costs = analytic(program, CARDS[CARD].machine)
        found += _strategies(f"{model}:32", program, costs, routed(program, costs))
    return found


def _strategies(of: str, program: Program, costs: Costs, order: tuple[int, ...]) -> list[Cell]:
    walk = Walk(program, order)
    found = []
    for strategy in STRATEGIES[:-1]:
        again = recomputing(program, costs, walk, order, strategy)
        peak = moving(program, costs, walk, again).peak
        found.append(Cell(of, strategy, "recomputed", len(again) - len(order), "steps"))
        found.append(_mib(of, strategy, "peak", peak))
    return found


CACHED = ("vgg16:256", "resnet50:256", "alexnet:1024")
POINTS = 6


def cached(table: Table) -> list[Cell]:
    """SuperNeurons, Table 3: bytes over the link, out and back, at budgets from the minimum to plain.

    "off" moves every checkpoint; "on" moves by need, and what the budget leaves is a tensor cache.
    """
    del table
    found = []
    for network in CACHED:
        model, batch = network.split(":")
        program = captured(model, int(batch), "float32")
        costs = analytic(program, CARDS[CARD].machine)
        policies = {
            "off": SuperNeurons(recompute="none", cache=False),
            "on": SuperNeurons(recompute="none"),
            "auto": Auto(),
        }
        least = policies["on"].plan(program, costs, 1)
        assert isinstance(least, Infeasible), "one byte is no budget"
        low = least.minimum_peak
        high = exact_need(program, costs)
        for point in range(POINTS):
            budget = low + (high - low) * point // (POINTS - 1)
            own = f"{network} at {budget / 2**30:.2f} GiB"
            for how, policy in policies.items():
                plan = policy.plan(program, costs, budget)
                if isinstance(plan, Plan):
                    moved = crossing(program, plan, budget if policy.caches else 0)
                    found.append(_mib(own, how, "moved", moved))
    return found


def exact_need(program: Program, costs: Costs) -> int:
    """The bytes with which SuperNeurons moves nothing."""
    plan = SuperNeurons().plan(program, costs, None)
    assert isinstance(plan, Plan), "without a budget there is a plan"
    return plan.predicted_peak


def crossing(program: Program, plan: Plan, budget: int) -> int:
    """Bytes over the link, out and back, of a step whose cache is what `budget` leaves."""
    if not plan.moves:
        return 0
    layout = layout_of(program, plan)
    capacity = min(max(budget - plan.predicted_peak, 0), layout.nbytes)
    found = traffic(events_of(program, plan), layout.slots, capacity)
    return found.out + found.into


def requests(table: Table) -> list[Cell]:
    """SuperNeurons, Table 2: how often a pool would be asked in a step. XLA's compiled step asks
    once, so there is nothing that a pool could make faster."""
    found = []
    for case in table.cases:
        program, _, plan = planned(case)
        asked = sum(isinstance(r, Allocate) for r in requests_of(program, plan.order))
        found.append(Cell(case.network, case.variant, "requests", asked, "a step"))
    return found


def _mib(of: str, how: str, what: str, nbytes: int) -> Cell:
    return Cell(of, how, what, nbytes / MIB, "MiB")


def _drawings() -> Any:
    """The networks that the tests of the policy have; they draw them layer by layer."""
    folder = str(Path(__file__).parent.parent / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
    import networks

    return networks


Calculation = Callable[[Table], Sequence[Cell]]
COMPUTED: dict[str, Calculation] = {
    "pools": pools,
    "lower_bounds": lower_bounds,
    "moved": moved,
    "techniques": techniques,
    "recomputations": recomputations,
    "requests": requests,
    "cached": cached,
}
"""By the name that a file of `tables/` has for them."""
