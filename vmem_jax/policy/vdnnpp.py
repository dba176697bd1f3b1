"""vdnnpp: vDNN whose compute waits for a copy only where it needs the bytes, or the memory.

Source: Shriram et al., "Dynamic Memory Management for GPU-based Training of Deep Neural Networks"
(vDNN++), IPDPS 2019.

- II-B: `aconv` moves what every second convolution reads.
- IV-A: forwards a layer begins as soon as the one before is done (Figure 8). What is offloaded is
  released when its copy has ended; compute waits for that only where memory would go over the peak
  that vDNN has, and before the backward pass begins. Backwards prefetches begin with the layers that
  vDNN's search finds, and compute waits for one only where it is read.
- IV-B: space for what is prefetched can be allocated before or after that of the derivative of the
  layer that computes. Both orders are simulated and the better one is taken (V-B). The paper's pool,
  its heuristics and its smallest size are in `core.pool`.

Differs from the paper:
1. With a budget, that is the memory that is not exceeded, if it is more than vDNN's peak. Peaks are
   those on XLA's heap (`core.heap`), which stands for the paper's pool. What is released late leaves
   other gaps there; compute then waits as if there were less memory, at last as often as in vDNN.
2. Whether a copy has ended is known from `simulate`, so a release is a position in the order. If a
   copy takes longer than predicted, compute waits there. After the derivative is a position behind
   the first step of the layer that computes.
3. `dyn` tries `aconv` after nothing and before `conv`. The paper does not say so, but its Table IV
   has the same times for `dyn` and `aconv` where that fits.
4. Bytes are compressed (IV-C) where `allow` names "compress", by `jit`: on the device, before the
   link, and into a size that the plan knows, with what finds no room there elsewhere.
5. Networks with branches are planned, too; the paper has linear ones.
What differs in `vdnn` differs here.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

from vmem_jax.core.costs import Costs
from vmem_jax.core.heap import heap_nbytes
from vmem_jax.core.layers import LayerKind
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.policy.layerwise import Walk
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.vdnn import VDNN


@dataclasses.dataclass(frozen=True)
class VDNNpp(VDNN):
    """Offloads the inputs of layers, and waits only where it must.

    Attributes:
      offload: "all", "conv", "aconv" (every second convolution), "none", or "dyn" to choose.
      algorithms: as `VDNN` has it.
    """

    name: ClassVar[str] = "vdnnpp"
    compresses: ClassVar[bool] = True
    offloads: ClassVar[tuple[str, ...]] = ("all", "conv", "aconv", "none")
    dynamic: ClassVar[tuple[tuple[str, str], ...]] = (
        VDNN.dynamic[0],
        ("aconv", "p"),
        *VDNN.dynamic[1:],
    )

    def offloading(self, walk: Walk, offload: str) -> tuple[int, ...]:
        """The layers whose X is moved."""
        if offload != "aconv":
            return super().offloading(walk, offload)
        giving = {stay.layer for stay in walk.stays}
        return tuple(n for n in walk.of_kind([LayerKind.CONVOLUTION]) if n in giving)[::2]

    def waiting(
        self, program: Program, costs: Costs, walk: Walk, timeline: Timeline, budget: int | None
    ) -> Timeline:
        """`timeline` of vDNN, without the waits that memory does not ask for.

        Of both orders of allocation the first that needs no more on XLA's heap than vDNN, or than
        the budget.
        """
        if not timeline.transfers or (budget is not None and timeline.peak > budget):
            return timeline  # memory asks for all waits
        need = lambda found: heap_nbytes(program, found.order, found.transfers)
        allowed = max(need(timeline), budget or 0)
        limit = max(timeline.peak, budget or 0)
        untils = {stay.buffer: stay.until for stay in walk.stays}
        first = [dataclasses.replace(t, back=untils[t.buffer]) for t in timeline.transfers]
        behind = [dataclasses.replace(t, fetch=min(t.fetch + 1, t.back)) for t in first]
        for share, moved in itertools.product(PARAMS.waited_shares, (first, behind)):
            waits = int(share * limit)
            released = releases(program, costs, timeline.order, moved, walk.turn, waits)
            found = simulate(program, timeline.order, costs, released)
            faster = found.seconds < timeline.seconds and found.peak <= limit
            if faster and need(found) <= allowed:
                return found
        return timeline


def releases(
    program: Program,
    costs: Costs,
    order: Sequence[int],
    moved: Sequence[Transfer],
    turn: int,
    limit: int,
) -> list[Transfer]:
    """`moved`, each gone where its copy has ended, or where memory would go over `limit` (IV-A).

    `gone` of `moved` is the first position at which it may be released; `turn` is the last.
    """
    assert costs.link is not None
    live = simulate(program, order, costs).live_nbytes
    nbytes = lambda t: program.buffers[t.buffer].nbytes
    begins: dict[int, list[Transfer]] = collections.defaultdict(list)
    for t in moved:
        begins[t.start].append(t)
    waiting: list[tuple[float, Transfer]] = []  # (end of its copy, which), first in, first out
    found = []
    now = free = 0.0
    away = 0
    for position in range(turn + 1):
        for t in begins[position]:
            free = max(now, free) + nbytes(t) / costs.link.out
            waiting.append((free, t))
        for entry in list(waiting):
            end, t = entry
            over = position == turn or live[position] - away > limit
            if t.gone <= position and (end <= now or over):
                now = max(now, end)
                waiting.remove(entry)
                found.append(dataclasses.replace(t, gone=position))
                away += nbytes(t)
        if position < turn:
            now += costs.seconds[order[position]]
    return sorted(found, key=lambda t: (t.start, t.buffer))
