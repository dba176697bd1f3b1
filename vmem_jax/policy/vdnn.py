"""vdnn: what layers read is moved to host memory, layer by layer, with a synchronisation after each.

Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
Network Design", MICRO 2016, arXiv:1602.08124.

- III-A: while the last consumer of a feature map computes forwards, its X goes to the host; on forks
  a reference count (Figure 3) finds that one, which is `Stay.layer`. Everything else is released
  after its last use (Figures 7 and 8), as a Plan has it anyway.
- III-B: compute waits at the end of a layer for what was offloaded in it, and at the end of a
  layer's backward computation for what was prefetched in it (Figure 9). Before each of these a layer
  to prefetch is searched as in Figure 10.
- III-C: `all` moves the X of every layer, `conv` that of convolutions. Convolutions take the smallest
  workspace (m) or the fewest seconds (p). `dyn` tries in turn: nothing moved (p), `conv` (p), `all`
  (p), `conv` and `all` with each convolution downgraded until it fits where it stands, `all` (m).
- vDNN+ is what Chen et al. call it with the sub-batches of moDNN ("moDNN: Memory Optimal DNN Training
  on GPUs", DATE 2018, V-B): `sub_batches=True`.

Differs from the paper:
1. `simulate` stands for the profiling passes of `dyn`, so none is run. The first of them, `all` (m),
   only decides whether the network can be trained at all; here it comes last, to the same end.
2. What the backward pass reads of a layer may be smaller than its X: an exact residual, such as the
   index of a pool. That is moved instead. An activation fused into its convolution has no X.
3. The batch is an argument of the step, which the caller holds, so the first layer's X stays.
4. The last layer's X is not moved, as in Figure 9: no layer is left to prefetch it in. What the
   search of Figure 10 misses otherwise is fetched when it is read.
5. The fully connected layers are moved by `all`, too; the paper leaves its classifier to Torch.
6. What is said of sub-batches in `modnn` holds for vDNN+.
7. With `allow=(..., "workspace")`, convolutions in micro-batches are among the algorithms.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.costs import Costs
from vmem_jax.core.layers import LayerKind
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.planned import costs_with_convolutions, simulate_with, with_convolutions
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline
from vmem_jax.policy.base import AbstractPolicy, Infeasible, Splitting
from vmem_jax.policy.convolving import fastest, fastest_fitting, smallest_workspaces
from vmem_jax.policy.layerwise import Walk, check_backward, check_convolutions, finish_walk
from vmem_jax.policy.option_checks import check_choice, check_flag
from vmem_jax.policy.order import lower_order


@dataclasses.dataclass(frozen=True)
class VDNN(AbstractPolicy):
    """Offloads the inputs of layers in the forward pass, and waits for the copies after each layer.

    Class attributes:
      offloads: the values of `offload`, besides "dyn".
      dynamic: the passes of "dyn": what is moved, and the algorithms.

    Attributes:
      offload: whose inputs move: "all" layers', "conv" only convolutions', "none"; or "dyn", the
        first of these that fits.
      algorithms: those of convolutions if `offload` is not "dyn": "m" for the smallest workspace, "p"
        for the fewest seconds. "m" needs the technique "workspace" too, which changes them.
      sub_batches: whether a step that does not fit otherwise runs in sub-batches (vDNN+).

    Raises:
      ValueError: an option is unknown.
      TypeError: `sub_batches` is no bool.
    """

    name: ClassVar[str] = "vdnn"
    needs: ClassVar[tuple[str, ...]] = ("offload",)
    chooses_convolutions: ClassVar[bool] = True
    offloads: ClassVar[tuple[str, ...]] = ("all", "conv", "none")
    dynamic: ClassVar[tuple[tuple[str, str], ...]] = (
        ("none", "p"),
        ("conv", "p"),
        ("all", "p"),
        ("conv", "greedy"),
        ("all", "greedy"),
        ("all", "m"),
    )
    offload: str = "dyn"
    algorithms: str = "p"
    sub_batches: bool = False

    @property
    def splitting(self) -> Splitting:
        return Splitting.FEWEST if self.sub_batches else Splitting.WHOLE

    def __post_init__(self) -> None:
        check_choice("offload", self.offload, (*self.offloads, "dyn"))
        check_choice("algorithms", self.algorithms, ("m", "p"))
        check_flag("sub_batches", self.sub_batches)
        if self.algorithms == "m" and self.offload != "dyn":  # XLA's own would not be changed
            object.__setattr__(self, "needs", (*type(self).needs, "workspace"))

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        """The static configuration, or the first pass of `dyn` that fits.

        Raises:
          LayersError: a static configuration has no backward pass, or no convolution for "conv".
        """
        order = lower_order(program, costs)
        walk = Walk(program, order)
        if "conv" in self.offload:
            check_convolutions(self.name, walk)
        if self.offload not in ("none", "dyn"):
            check_backward(self.name, walk)
        static = ((self.offload, self.algorithms),)
        lowest: tuple[Timeline, dict[int, Configuration]] | None = None
        for offload, algorithms in self.dynamic if self.offload == "dyn" else static:
            moved = transfers(walk, self.offloading(walk, offload)) if costs.link else ()
            found = configured(program, costs, order, moved, algorithms, budget)
            if lowest is None or found[0].peak <= lowest[0].peak:
                lowest = found
            if budget is None or found[0].peak <= budget:
                lowest = found
                break
        assert lowest is not None, "there is at least one pass"
        timeline, chosen = lowest
        timeline = self.waiting(
            with_convolutions(program, chosen.items()),
            costs_with_convolutions(chosen.items(), costs),
            walk,
            timeline,
            budget,
        )
        return finish_walk(self.name, program, walk, timeline, budget, chosen)

    def offloading(self, walk: Walk, offload: str) -> tuple[int, ...]:
        """The layers whose X is moved (III-C)."""
        if offload == "none":
            return ()
        return walk.of_kind([LayerKind.CONVOLUTION] if offload == "conv" else list(LayerKind))

    def waiting(
        self, program: Program, costs: Costs, walk: Walk, timeline: Timeline, budget: int | None
    ) -> Timeline:
        """`timeline`, which waits at the end of each layer, with the waits that are asked for."""
        del program, costs, walk, budget
        return timeline


def transfers(walk: Walk, offloaded: Collection[int]) -> tuple[Transfer, ...]:
    """The four points of what the layers of `offloaded` give up (III-B, Figure 9)."""
    fetches = prefetches(walk, offloaded)
    last = walk.backward[0][1] if walk.backward else None
    found = []
    for stay in walk.stays:
        if stay.layer not in offloaded or stay.layer == last:
            continue
        start = max(walk.begin[stay.layer], stay.made)
        gone = max(walk.end[stay.layer], stay.since)
        fetch, back = fetches.get(stay.layer, (stay.until, stay.until))
        fetch, back = min(fetch, stay.until), min(back, stay.until)
        if gone < fetch:
            found.append(Transfer(stay.buffer, min(start, gone), gone, fetch, back))
    return tuple(sorted(found, key=lambda t: (t.start, t.buffer)))


def prefetches(walk: Walk, offloaded: Collection[int]) -> dict[int, tuple[int, int]]:
    """For each layer that is found in time the begin and the end of the layer that prefetches it.

    The search goes along the order in which this step computes backwards, and a fork's X is looked
    for where the first of its readers is: the paper numbers its layers, but JAX goes back through
    some branches in the order of their forward pass.
    """
    due: dict[int, int] = {}  # layer -> where the first of what it gave up is read
    for stay in walk.stays:
        if stay.layer in offloaded:
            due[stay.layer] = min(due.get(stay.layer, stay.until), stay.until)
    begins = [p for p, _ in walk.backward]
    needed: list[list[int]] = [[] for _ in walk.backward]
    for n in sorted(due, key=lambda n: due[n]):
        if (i := bisect.bisect_right(begins, due[n]) - 1) >= 0:
            needed[i].append(n)
    ahead = [(walk.layers[n].kind, needed[i]) for i, (_, n) in enumerate(walk.backward)]
    found: dict[int, tuple[int, int]] = {}
    for i, (begin, _) in enumerate(walk.backward):
        for n in find_prefetch_layer(ahead[i + 1 :], found):
            found[n] = begin, begins[i + 1]
    return found


def find_prefetch_layer(
    ahead: Iterable[tuple[LayerKind, Collection[int]]], prefetched: Collection[int]
) -> list[int]:
    """What is prefetched while the layer in front of `ahead` computes backwards (Figure 10).

    Args:
      ahead: the layers that compute after it, each with its kind and the layers of which it is the
        first to read what they gave up; in a network without forks that is itself.
      prefetched: the layers that were found before.
    """
    for kind, needed in ahead:
        if found := [n for n in needed if n not in prefetched]:
            return found
        if kind is LayerKind.CONVOLUTION:
            break
    return []


def configured(
    program: Program,
    costs: Costs,
    order: Sequence[int],
    moved: Sequence[Transfer],
    algorithms: str,
    budget: int | None,
) -> tuple[Timeline, dict[int, Configuration]]:
    """The timeline with those transfers and algorithms, and what does each convolution.

    `algorithms`: "m", "p", or "greedy": each convolution the fastest that fits where it stands.
    """
    run = lambda chosen: simulate_with(program, order, costs, chosen.items(), moved)
    configurations = costs.convolutions
    if algorithms == "p" or (algorithms == "greedy" and budget is None):
        chosen = fastest(configurations)
        return run(chosen), chosen
    chosen = smallest_workspaces(configurations)
    timeline = run(chosen)
    if algorithms == "greedy" and budget is not None and configurations:
        chosen = fastest_fitting(configurations, timeline, chosen, budget)
        timeline = run(chosen)
    return timeline, chosen
