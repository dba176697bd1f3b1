"""superneurons: liveness, then a cache of checkpoints, then recomputation of the layers between them.

Source: Wang et al., "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks",
PPoPP 2018, arXiv:1801.04380.

- 3.1, Algorithm 1: layers run depth first, a join when all before it have run; backwards in reverse.
- 3.2: what no later step reads is freed: that is what a Plan does. Peak: all outputs, and the last
  layer backwards.
- 3.3.1: the outputs of convolutions, the checkpoints, go to the host from their own layer to the next
  convolution, and are fetched from one convolution backwards to the one before.
- 3.3.2, Algorithm 2: only when memory runs out, and then the least recently used of them first.
- 3.4: residual joins are checkpoints too: Table 1's counts for ResNets are those without them.
  What layers between checkpoints make is freed and made again backwards: for all layers of a
  segment at once (speed-centric), for each of them anew (memory-centric), or the former where that
  does not exceed the largest layer, the peak of the latter (cost-aware). Peak: the largest layer.
- 3.5: each convolution gets the fastest algorithm for which there is memory at its step.

Differs from the paper:
1. With more memory than liveness needs, nothing else is done. With less, the cache, recomputation
   and both are compared by `simulate`, and the fastest that fits is taken.
2. Algorithm 2 is simulated before the step is compiled, so what the cache evicts is known: it
   begins to leave as soon as it is made, and is fetched ahead where there is room. At run time what
   the compiled step leaves of the budget is a tensor cache with the same rule (`api.cache`).
3. Where the order of Algorithm 1 has a higher peak than the canonical one, the latter is taken.
4. Memory is weighed by the simulated step, workspaces and gradients of weights included, and not by
   the sums of section 3.4. Fully connected layers are checkpoints that stay.
5. An activation that is fused into its convolution or join is part of the checkpoint. Where the
   backward pass reads less than a layer's X, an exact residual such as a pool's index, X itself is
   not kept; the residual is moved as a checkpoint if it cannot be made without the one before it.
6. XLA allocates device memory, so there is no pool of 1 KiB blocks (3.2.1).
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import itertools
from collections.abc import Collection, Sequence
from typing import ClassVar

from vmem_jax.core.costs import Costs
from vmem_jax.core.layers import Layer, LayerKind, feature_maps, layers
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.planned import costs_with_convolutions, simulate_with, with_convolutions
from vmem_jax.core.program import Phase, Program
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.policy.base import AbstractPolicy, Infeasible
from vmem_jax.policy.convolving import fastest, fastest_fitting, smallest_workspaces
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.layerwise import Walk, finish_walk
from vmem_jax.policy.option_checks import check_choice, check_flag
from vmem_jax.policy.order import lower_order, ranked_order
from vmem_jax.policy.recomputation import Drop, Recomputation
from vmem_jax.policy.transfer_schedule import rank

STRATEGIES = ("cost-aware", "speed-centric", "memory-centric", "none")
CHECKPOINTS = (LayerKind.CONVOLUTION, LayerKind.FULLY_CONNECTED)
"""Layers that compute too much to be run again (3.4)."""


@dataclasses.dataclass(frozen=True)
class SuperNeurons(AbstractPolicy):
    """Moves the outputs of convolutions, or recomputes the layers between them, or both: the fastest.

    Attributes:
      recompute: "speed-centric" recomputes a segment once, "memory-centric" for each layer anew,
        "cost-aware" the former where it stays below the largest layer; "none" recomputes nothing.
      cache: whether checkpoints move only where they must, the least recently used first, and what
        the budget leaves is a tensor cache; or all checkpoints move over the link.

    Raises:
      ValueError: `recompute` is unknown.
      TypeError: `cache` is no bool.
    """

    name: ClassVar[str] = "superneurons"
    needs: ClassVar[tuple[str, ...]] = ("offload", "recompute")
    chooses_convolutions: ClassVar[bool] = True
    recompute: str = "cost-aware"
    cache: bool = True

    @property
    def caches(self) -> bool:
        return self.cache

    def __post_init__(self) -> None:
        check_choice("recompute", self.recompute, STRATEGIES)
        check_flag("cache", self.cache)

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        """Liveness alone if that fits, else the fastest of the cache, recomputation, and both."""
        configurations = costs.convolutions
        chosen = fastest(configurations) if budget is None else smallest_workspaces(configurations)
        less = with_convolutions(program, chosen.items())
        seconds = costs_with_convolutions(chosen.items(), costs)
        order = routed(less, seconds)
        walk = Walk(less, order)
        best = simulate(less, order, seconds)
        if budget is not None and best.peak > budget:
            found = [best, self._moved(less, seconds, order, walk, budget)]
            if self.recompute != "none":
                run = recomputing(less, seconds, walk, order, self.recompute)
                found += [
                    simulate(less, run, seconds),
                    self._moved(less, seconds, run, walk, budget),
                ]
                if all(timeline.peak > budget for timeline in found):
                    found.append(moving(less, seconds, walk, run))
            best = min(found, key=lambda timeline: rank(timeline, budget))
        if budget is not None and best.peak <= budget:
            chosen = fastest_fitting(configurations, best, chosen, budget)
            best = simulate_with(program, best.order, costs, chosen.items(), best.transfers)
        return finish_walk(self.name, program, walk, best, budget, chosen)

    def _moved(
        self, program: Program, costs: Costs, order: Sequence[int], walk: Walk, budget: int
    ) -> Timeline:
        if self.cache:
            return caching(program, costs, walk, order, budget)
        return moving(program, costs, walk, order)


# -- 3.1: the order


def route(network: Sequence[Layer]) -> tuple[int, ...]:
    """The layers in the order of their computation (Algorithm 1)."""
    maker = {b: n for n, layer in enumerate(network) for b in layer.outputs}
    before = [{maker[b] for b in layer.inputs if b in maker} for layer in network]
    following: list[list[int]] = [[] for _ in network]
    for n, earlier in enumerate(before):
        for e in sorted(earlier):
            following[e].append(n)
    counter = [0] * len(network)
    found: list[int] = []
    stack = [n for n in reversed(range(len(network))) if not before[n]]
    while stack:
        n = stack.pop()
        counter[n] += 1
        if counter[n] >= len(before[n]):  # a join waits for all before it
            found.append(n)
            stack += reversed(following[n])
    return tuple(found)


def routed(program: Program, costs: Costs) -> tuple[int, ...]:
    """The steps in the order of `route`, backwards in reverse; or in an order of a lower peak."""
    base = lower_order(program, costs)
    network = layers(program)
    path = route(network)
    if path == tuple(range(len(network))):
        return base
    turn = len(network)
    position = {s: p for p, s in enumerate(base)}
    stage: dict[int, int] = {}
    for at, n in enumerate(path):
        stage.update(dict.fromkeys(network[n].forward, at))
        stage.update(dict.fromkeys(network[n].backward, 2 * turn - at))
    latest = turn
    for s in base:  # an update follows what it stands behind
        latest = stage.setdefault(s, latest)
    found = ranked_order(program, [(stage[s], position[s]) for s in range(len(program.steps))])
    return min((found, base), key=lambda order: simulate(program, order, costs).peak)


# -- 3.3: transfers


def moving(program: Program, costs: Costs, walk: Walk, order: Sequence[int]) -> Timeline:
    """`order` with the outputs of all convolutions and residual joins moved (3.3.1)."""
    if costs.link is None:
        return simulate(program, order, costs)
    found = []
    starts = _convolutions(program, walk, order)
    for b, uses in _checkpoints(program, walk, order).items():
        ahead = [p for p in uses if p < starts.turn]
        until = min((p for p in uses if p >= starts.turn), default=0)
        later = [p for p in starts.forward if p > uses[0]]
        gone = max([ahead[-1] + 1, *later[:1]])
        fetch = starts.before(until)
        if gone < fetch:
            found.append(Transfer(b, uses[0] + 1, gone, fetch, until))
    return simulate(program, order, costs, sorted(found, key=lambda t: (t.start, t.buffer)))


def caching(
    program: Program, costs: Costs, walk: Walk, order: Sequence[int], capacity: int
) -> Timeline:
    """`order` with as many checkpoints moved as `capacity` bytes ask for (Algorithm 2).

    Where memory runs out, the one that was used the longest ago leaves; what the step itself uses
    is locked. Its copy begins with its idle interval (the first one of all: when it is made), and it
    is fetched from one convolution backwards to the one before, or later where there is no room.
    """
    if costs.link is None:
        return simulate(program, order, costs)
    live = list(simulate(program, order, costs).live_nbytes)
    uses = _checkpoints(program, walk, order)
    starts = _convolutions(program, walk, order)
    found: list[Transfer] = []
    away: set[int] = set()  # what was away already
    idle: list[tuple[int, int]] = []  # heap of (position of the last use, buffer)
    used: dict[int, list[int]] = {}  # position -> buffers
    for b, at in uses.items():
        for p in at[:-1]:
            used.setdefault(p, []).append(b)
    returns: dict[int, list[int]] = {}  # position -> buffers that are fetched there
    for position in range(len(order)):
        for b in returns.get(position, ()):
            at = uses[b]
            heapq.heappush(idle, (at[bisect.bisect_left(at, position) - 1], b))
        locked = []
        while live[position] > capacity and idle:
            since, b = heapq.heappop(idle)  # the least recently used
            at, nbytes = uses[b], program.buffers[b].nbytes
            i = bisect.bisect_left(at, position)
            if at[i - 1] != since:
                continue
            if at[i] == position:
                locked.append((since, b))
                continue
            fetch = max(starts.before(at[i]), position + 1)
            for p in range(fetch, at[i]):
                if live[p] > capacity:
                    fetch = p + 1
            begun = since if b in away else at[0]
            found.append(Transfer(b, min(begun + 1, position), position, fetch, at[i]))
            away.add(b)
            returns.setdefault(fetch, []).append(b)
            live[position:fetch] = [n - nbytes for n in live[position:fetch]]
        for entry in locked:
            heapq.heappush(idle, entry)
        for b in used.get(position, ()):
            heapq.heappush(idle, (position, b))
    return simulate(program, order, costs, sorted(found, key=lambda t: (t.start, t.buffer)))


def _turn(program: Program, order: Sequence[int]) -> int:
    """Position of the first step of the backward pass; the end, if there is none."""
    back = (p for p, s in enumerate(order) if program.steps[s].phase is Phase.BACKWARD)
    return next(back, len(order))


def _checkpoints(program: Program, walk: Walk, order: Sequence[int]) -> dict[int, list[int]]:
    """What can be moved, each with the positions of its uses: the outputs of convolutions and joins,
    and what would take one of them to be made again. What is made again anyway is not moved."""
    home = {s: layer for layer in walk.layers for s in layer.forward}
    cheap, joined = _cheap(program, walk), joins(program, walk.layers)
    uses: dict[int, list[int]] = {}
    for b in (stay.buffer for stay in walk.stays):
        made_by = home[program.producer[b]]
        is_checkpoint = made_by.kind is LayerKind.CONVOLUTION or b in joined
        if is_checkpoint or not (_costly(program, made_by) or b in cheap):
            uses[b] = []
    runs = collections.Counter(order)
    uses = {b: at for b, at in uses.items() if runs[program.producer[b]] == 1}
    for position, s in enumerate(order):
        for b in (*program.steps[s].reads, *program.steps[s].writes):
            if b in uses:
                uses[b].append(position)
    return uses


@dataclasses.dataclass(frozen=True)
class _Starts:
    """Positions at which convolutions begin, forwards and backwards, and of the turn."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    turn: int

    def before(self, until: int) -> int:
        """Where what is read at `until` is fetched: the convolution before, or the turn."""
        i = bisect.bisect_left(self.backward, until)
        return self.backward[i - 1] if i else min(self.turn, until)


def _convolutions(program: Program, walk: Walk, order: Sequence[int]) -> _Starts:
    first: dict[int, int] = {}
    for position, s in enumerate(order):
        first.setdefault(s, position)
    found = [layer for layer in walk.layers if layer.kind is LayerKind.CONVOLUTION]
    forward = sorted(min(first[s] for s in layer.forward) for layer in found)
    backward = sorted(min(first[s] for s in layer.backward) for layer in found if layer.backward)
    return _Starts(tuple(forward), tuple(backward), _turn(program, order))


# -- 3.4: recomputation


def recomputing(
    program: Program, costs: Costs, walk: Walk, base: tuple[int, ...], strategy: str
) -> tuple[int, ...]:
    """`base` with the layers between checkpoints run again by `strategy`, a name of STRATEGIES."""
    segments = _segments(program, walk)
    every = frozenset(range(len(segments)))
    run = lambda again: _again(program, costs, walk, base, segments, again)
    if strategy != "cost-aware":
        return run(every if strategy == "memory-centric" else frozenset())
    lowest, quickest = run(every), run(frozenset())
    limit = moving(program, costs, walk, lowest).peak  # l_peak, of the largest layer
    timeline = moving(program, costs, walk, quickest)
    turn = _turn(program, quickest)
    home = {b: i for i, segment in enumerate(segments) for b in segment}
    touched: dict[int, tuple[int, int]] = {}  # segment -> its first and last position
    for p, s in enumerate(quickest[turn:], turn):
        for b in (*program.steps[s].reads, *program.steps[s].writes):
            if b in home:
                touched[home[b]] = touched.get(home[b], (p, p))[0], p
    over = {
        i
        for i, (first, last) in touched.items()
        if max(timeline.live_nbytes[first : last + 1]) > limit
    }
    found = run(frozenset(over))
    return found if moving(program, costs, walk, found).peak <= limit else lowest


def _segments(program: Program, walk: Walk) -> list[frozenset[int]]:
    """What the layers from each checkpoint to the next leave to the backward pass."""
    cheap = _cheap(program, walk)
    home = {s: n for n, layer in enumerate(walk.layers) for s in layer.forward}
    costly = _costly_steps(program, walk)
    begins = (not costly.isdisjoint(layer.forward) for layer in walk.layers)
    checkpoint = list(itertools.accumulate(begins))
    found: dict[int, set[int]] = {}
    for b in cheap:
        found.setdefault(checkpoint[home[program.producer[b]]], set()).add(b)
    return [frozenset(found[key]) for key in sorted(found)]


def joins(program: Program, network: Sequence[Layer]) -> frozenset[int]:
    """The outputs of residual joins: sums of feature maps of different checkpoints.

    Two feature maps at least, each as large as the output, that are made from different checkpoints.
    The statistics of a batch norm are smaller than its output, the parts of a concatenation, too.
    """
    features = feature_maps(program)
    home = {s: layer for layer in network for s in layer.forward}
    sources: dict[int, frozenset[int]] = {}  # buffer -> the checkpoints that it is made from
    found = set()
    for s, step in enumerate(program.steps):
        if s not in home:
            continue
        read = [b for b in step.reads if b in features]
        behind = frozenset[int]().union(*(sources.get(b, frozenset([b])) for b in read))
        for w in step.writes:
            large = [b for b in read if program.buffers[b].nbytes >= program.buffers[w].nbytes]
            made_from = {sources.get(b, frozenset([b])) for b in large}
            if not _costly(program, home[s]) and len(made_from) > 1 and program.buffers[w].nbytes:
                found.add(w)
            ends = w in found or _costly(program, home[s])
            sources[w] = frozenset([w]) if ends else behind
    return frozenset(found)


def _costly(program: Program, layer: Layer) -> bool:
    heavy = any(not program.steps[s].fusible for s in layer.forward)
    return layer.kind in CHECKPOINTS or (layer.kind is LayerKind.OTHER and heavy)


def _costly_steps(program: Program, walk: Walk) -> frozenset[int]:
    """The steps of checkpoints, which do not run again."""
    found = {s for layer in walk.layers if _costly(program, layer) for s in layer.forward}
    return frozenset(found | {program.producer[b] for b in joins(program, walk.layers)})


def _cheap(program: Program, walk: Walk) -> frozenset[int]:
    """The stays that are made again without a checkpoint's layer: from other stays and arguments."""
    stays = {stay.buffer for stay in walk.stays}
    costly = _costly_steps(program, walk)
    known: dict[int, bool] = {}
    for s, step in enumerate(program.steps):
        there = lambda r: r in stays or program.is_resident[r] or known.get(r, False)
        again = s not in costly and step.pure and all(map(there, step.reads))
        known.update(dict.fromkeys(step.writes, again))
    return frozenset(b for b in stays if known[b])


def _again(
    program: Program,
    costs: Costs,
    walk: Walk,
    base: tuple[int, ...],
    segments: Sequence[frozenset[int]],
    memory_centric: Collection[int],
) -> tuple[int, ...]:
    """`base` with `segments` made again: those of `memory_centric` for each layer anew."""
    recomputation = Recomputation(program, base)
    costly = _costly_steps(program, walk)

    def cheap(b: int, need: int) -> bool:
        """Whether `b` is made before position `need` from what is there, with no checkpoint again."""
        s = program.producer[b]
        there = lambda r: program.is_resident[r] or recomputation.uses[r][-1] >= need
        return s not in costly and all(there(r) or cheap(r, need) for r in program.steps[s].reads)

    visits = [p for p, _ in walk.backward]
    drops: set[Drop] = set()
    forget: set[int] = set()
    for i, segment in enumerate(segments):
        for b in segment:
            uses = recomputation.uses[b]
            for n, (use, following) in enumerate(itertools.pairwise(uses)):
                if not cheap(b, following):
                    continue
                if use < walk.turn <= following:
                    drops.add((b, n))
                elif use >= walk.turn and i in memory_centric:
                    # the next layer backwards reads as its Y what this one read as its X
                    if bisect.bisect(visits, following) - bisect.bisect(visits, use) > 1:
                        drops.add((b, n))
        if i in memory_centric:
            forget |= segment
    run = Execution(program, costs, base, drops, recomputation=recomputation, forget=forget)
    return tuple(run.order)
