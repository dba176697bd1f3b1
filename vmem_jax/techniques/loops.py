"""loops: chooses the residuals that are stacked between forward and backward scans. Part of
"recompute": a backward loop recomputes what is not stacked, iteration by iteration."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence

from absl import logging

from vmem_jax import jax_compat as compat
from vmem_jax.capture.capture import capture_pair
from vmem_jax.capture.loop_levels import Stacking
from vmem_jax.capture.loop_pairs import Pair
from vmem_jax.capture.loop_segments import can_be_divided
from vmem_jax.core.costs import analytic
from vmem_jax.core.liveness import live_nbytes, step_nbytes
from vmem_jax.core.machine import Machine
from vmem_jax.core.paired import PairedLoop
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import predicted_need
from vmem_jax.core.program import Kind, LoopSegments
from vmem_jax.errors import show_nbytes
from vmem_jax.jax_compat import Var
from vmem_jax.policy.body_memory import BodyMemory
from vmem_jax.policy.exact import Exact
from vmem_jax.policy.residuals import Held, Kept, choose, front
from vmem_jax.policy.segment_lengths import Divided
from vmem_jax.rewrite.bodies import with_ordered_bodies
from vmem_jax.techniques.bits import levels_of
from vmem_jax.techniques.context import StepContext
from vmem_jax.techniques.params import PARAMS
from vmem_jax.tracing.traced import TracedStep


def loop_contexts(
    step: StepContext, budget: int | None, every: bool = False, limits: Iterable[int] = ()
) -> list[StepContext]:
    """The forms of `step` in which its loops stack other values; none if the policy or `allow` leaves
    loops as they are.

    Args:
      every: whether to make also those whose stacks do not fit, which is of use if values may move.
      limits: bytes that the form may need as a whole where it runs in sub-batches, the fewest first;
        the fastest within each is made, too.
    """
    if budget is None or not _chooses(step):
        return []
    chosen = [*_chosen_of(step, budget, every)]
    variants = _variants_of(step)
    chosen += (v for v in variants.fastest_within(limits, chosen) if not variants.is_own(v))
    return [  # the same ones for another budget
        step.cached(f"loops {_key(variant.kept)}", functools.partial(step.of, variant.traced))
        for variant in chosen
    ]


def least_outside_loops(step: StepContext) -> int:
    """Bytes that every plan of `step` needs at least, whatever its loops stack: its arguments and the
    largest of its other steps."""
    program = step.traced.captured.program
    others = (each for each in program.steps if each.op != "scan")
    largest = max((step_nbytes(program, each) for each in others), default=0)
    return program.resident_nbytes + largest


def lowest_need(step: StepContext, budget: int | None) -> int:
    """The lowest predicted need of `step` and its `loop_contexts`, in bytes; 0 where it has none."""
    if not _chooses(step) or not _variants_of(step).pairs:
        return 0
    variants = _variants_of(step).own, *_chosen_of(step, budget)
    return min(variant.need for variant in variants)


def peaks_outside_loops(step: StepContext, budget: int | None) -> bool:
    """Whether a form of `step` with other stacks that may fit, or where there is none `step` itself,
    peaks elsewhere than in its loops; true of a step without loops, or whose stacks are not chosen.
    """
    if not _chooses(step) or not _variants_of(step).pairs:
        return True
    variants = _chosen_of(step, budget) or (_variants_of(step).own,)
    return any(variant.peaks_outside for variant in variants)


def _variants_of(step: StepContext) -> _Variants:
    return step.cached("loops", lambda: _Variants(step.traced, step.machine))


def _chosen_of(
    step: StepContext, budget: int | None, every: bool = False
) -> tuple[LoopVariant, ...]:
    choose = lambda: _chosen(_variants_of(step), budget, every)
    return step.cached(f"stacks for {budget} {every}", choose)


def _chooses(step: StepContext) -> bool:
    return step.settings.policy.name == "auto" and "recompute" in step.settings.allowed


def with_loops(
    step: StepContext,
    kept: tuple[tuple[int, ...], ...],
    segments: LoopSegments,
) -> StepContext:
    """`step` whose loops stack what a plan says, `Plan.kept` and `Plan.segments`; itself where it has
    no such loops."""
    variants = _Variants(step.traced, step.machine)
    segments = (((), ()),) * len(kept) if segments is None else segments
    if not len(variants.loops) == len(kept) == len(segments):
        return step
    every, parts = (tuple(each[i] for each in segments) for i in (0, 1))
    for loop, own, lengths, part in zip(variants.loops, kept, every, parts, strict=True):
        fall = all(a > b for a, b in itertools.pairwise((loop.length, *lengths, 1)))
        if not loop.keepable >= {*own} >= {*part} or (lengths and not fall):
            return step
    chosen = Kept(tuple(map(frozenset, kept)), 0, 0.0, every, tuple(map(frozenset, parts)))
    return step.of(variants.of(chosen).traced)


@dataclasses.dataclass(frozen=True)
class LoopVariant:
    """A step with other values stacked between its loops.

    Attributes:
      traced: it; its `plain` is that step, too.
      kept: what is stacked.
      need, seconds: what it is predicted to need, in bytes, and to take where nothing else is
        recomputed.
      peaks_outside: whether most is live then outside of these loops.
    """

    traced: TracedStep
    kept: Kept
    need: int
    seconds: float
    peaks_outside: bool

    def __str__(self) -> str:
        seconds = 1e3 * self.kept.seconds
        return f"loops stack {show_nbytes(self.kept.nbytes)}, which takes {seconds:.1f} ms"


def loop_variants(
    traced: TracedStep, machine: Machine, budget: int | None = None
) -> tuple[LoopVariant, ...]:
    """`traced` with other values stacked between its loops: from the fewest seconds to the fewest
    bytes, and what needs `budget` bytes as nearly as can be, or a little less. Empty where it has no
    such loops.

    Args:
      machine: what the choices are made for.
    """
    return _chosen(_Variants(traced, machine), budget, every=True)


def _chosen(
    variants: _Variants, budget: int | None, every: bool = False
) -> tuple[LoopVariant, ...]:
    if not variants.pairs:
        return ()
    found = variants.some(None if every else budget)
    if budget is not None and all(variant.need > budget for variant in found):
        found += [*variants.lowest(), *variants.divided()]
    goals = [] if budget is None else [int(share * budget) for share in PARAMS.budget_goals]
    for goal in goals:
        found += variants.near(goal, found)
    found = [variant for variant in found if not variants.is_own(variant)]
    for variant in found:
        logging.info("%s", variant)
    return tuple(sorted(found, key=lambda variant: -variant.kept.nbytes))


def _ids(kept: Kept) -> tuple[tuple[int, ...], ...]:
    """As `Program.kept` has them."""
    return tuple(tuple(sorted(buffers)) for buffers in kept.buffers)


def _key(kept: Kept) -> Hashable:
    """Equal for choices that give the same step."""
    return _ids(kept), kept.segments


class _Variants:
    def __init__(self, traced: TracedStep, machine: Machine) -> None:
        self.traced, self.machine = traced, machine
        self.flat = traced.captured.separate
        self.level = levels_of(traced)
        self.pairs: Sequence[Pair] = [pair for pair, _ in self.level.all_pairs]
        given = traced.captured.inputs
        made = [capture_pair(pair, level.shards, given) for pair, level in self.level.all_pairs]
        self.loops: list[PairedLoop] = [
            dataclasses.replace(loop, times=level.times)
            for (loop, _), (_, level) in zip(made, self.level.all_pairs, strict=True)
        ]
        self.variables: list[tuple[Var, ...]] = [variables for _, variables in made]
        self.are_divisible = all(map(can_be_divided, self.level.scans))
        self.made: dict[Hashable, LoopVariant] = {}

    @functools.cached_property
    def own(self) -> LoopVariant:
        """The step with the stacks of its own loops."""
        return self.predicted(self.traced, Kept((), 0, 0.0))

    def is_own(self, variant: LoopVariant) -> bool:
        """Whether it is the step itself: the stacks of its own loops, chosen once more."""
        return (variant.need, variant.seconds) == (self.own.need, self.own.seconds)

    @functools.cached_property
    def front(self) -> Sequence[Kept]:
        return front(self.loops, self.machine, PARAMS.stack_choices)

    def least(self, kept: Kept) -> int:
        """Bytes that every plan of the step that stacks `kept` needs at least, if nothing moves: the
        arguments, and the stacks of one loop, which exist at once where it ends."""
        program = self.traced.captured.program
        held = (program.buffers[b] for b in program.inputs if b not in program.hosted)
        arguments = sum(buffer.nbytes for buffer in held if buffer.kind is not Kind.CONSTANT)
        return arguments + max(kept.each, default=0)

    def some(self, budget: int | None) -> list[LoopVariant]:
        """The steps of the front; with a budget those that may fit, down to one that is likely to fit
        or to the one with the fewest bytes in stacks; then also those behind it that are faster,
        though with fewer stacks they are expected to take longer."""
        found = list[LoopVariant]()
        for kept in self.front:
            if budget is None or self.least(kept) <= budget or kept is self.front[-1]:
                found.append(self.of(kept))
                if budget is not None and found[-1].need <= PARAMS.likely_to_fit * budget:
                    found += self._faster_behind(found[-1])
                    break
        return found

    def _faster_behind(self, last: LoopVariant) -> Iterator[LoopVariant]:
        """The steps of the front behind `last`, while each is predicted to be faster than the one
        before. None is made that is expected to take longer by more than that is off."""
        for kept in self.front[self.front.index(last.kept) + 1 :]:
            if kept.seconds > last.kept.seconds + PARAMS.stacks_off * last.seconds:
                return
            variant = self.of(kept)
            if variant.seconds >= last.seconds:
                return
            yield variant
            last = variant

    def fastest_within(
        self, limits: Iterable[int], found: Sequence[LoopVariant]
    ) -> Iterator[LoopVariant]:
        """The fastest step of the front within each of `limits`, which rise; none that is no faster
        than one before or than all of `found`."""
        fastest = min((variant.seconds for variant in found), default=math.inf)
        for limit in limits if self.pairs else ():
            for kept in self.front:  # from the fewest seconds, and none is made that cannot fit
                if self.least(kept) > limit:
                    continue
                variant = self.of(kept)
                if variant.seconds >= fastest:
                    break
                if variant.need <= limit:
                    fastest = variant.seconds
                    yield variant
                    break

    @functools.cached_property
    def lowest_of_front(self) -> Sequence[LoopVariant]:
        """The steps of the front of which one needs the fewest bytes, whatever a budget is."""
        found = list[LoopVariant]()
        for kept in sorted(self.front, key=self.least):
            if self.least(kept) <= min((variant.need for variant in found), default=math.inf):
                found.append(self.of(kept))
        return found

    def of(self, kept: Kept) -> LoopVariant:
        """The step that stacks `kept`, made once."""
        if _key(kept) not in self.made:
            self.made[_key(kept)] = self._new(kept)
        return self.made[_key(kept)]

    def _new(self, kept: Kept) -> LoopVariant:
        none = (frozenset[int](),) * len(self.loops)
        each = zip(
            self.variables,
            kept.buffers,
            kept.every or ((),) * len(self.loops),
            kept.parts or none,
            strict=True,
        )
        stackings = (
            Stacking(
                [variables[b] for b in sorted(own)], every, [variables[b] for b in sorted(part)]
            )
            for variables, own, every, part in each
        )
        made, divided = self.level.again(stackings)
        captured = self.traced.captured.rewritten(
            made, _ids(kept), kept.segments, divided, with_ordered_bodies
        )
        traced = dataclasses.replace(self.traced, captured=captured, plain=captured.flat)
        return self.predicted(traced, kept)

    def predicted(self, traced: TracedStep, kept: Kept) -> LoopVariant:
        """`traced`, and what is predicted of it where nothing but its loops recomputes."""
        captured, program = traced.captured, traced.captured.program
        plan = Exact().plan(program, analytic(program, self.machine), None)
        assert isinstance(plan, Plan), "without a budget there is always a plan"
        live = live_nbytes(program, plan.order)
        writes = program.steps[plan.order[live.argmax()]].writes if len(live) else ()
        outside = not self.others.isdisjoint(captured.variables[b] for b in writes)
        need, seconds = predicted_need(program, plan), plan.predicted_seconds
        return LoopVariant(traced, kept, need, seconds, outside)

    @functools.cached_property
    def others(self) -> frozenset[Var]:
        """What is made outside of the loops."""
        paired = {i for pair in self.level.pairs for i in (pair.forward, pair.backward)}
        paired |= {i for i, _ in self.level.inner}
        eqns = enumerate(compat.open_jaxpr(self.level.flat).eqns)
        return frozenset(v for i, eqn in eqns if i not in paired for v in eqn.outvars)

    @functools.cached_property
    def held(self) -> Held:
        """What counts beside the stacks, by what the lowest choices are predicted to need.
        Where the step peaks elsewhere, what its loops hold does not count."""
        levels = [level for _, level in self.level.all_pairs]
        waiting = (
            frozenset(
                j
                for j, other in enumerate(self.pairs)
                if levels[j] is not level or other.forward < pair.backward <= other.backward
            )
            for pair, level in zip(self.pairs, levels, strict=True)
        )
        held = Held(tuple(map(BodyMemory, self.loops)), tuple(waiting))
        made = self.lowest_of_front
        for variant in made:
            held = held.with_most(variant.kept)
        beside = min(variant.need - variant.kept.nbytes for variant in made)
        rest = min(variant.need - held.nbytes(variant.kept) for variant in made)
        return dataclasses.replace(held, least=max(beside - rest, 0))

    def lowest(self) -> Iterator[LoopVariant]:
        """The choice with the fewest bytes of stacks and of what counts beside them, and the one
        without what that adds to the fewest stacks, both where they need less than the front.

        XLA may hold more than is predicted: where the input of a decoder's second half is stacked,
        it merges the gradients of two products into one kernel with two results.
        """
        if not self.front:
            return
        fewest, kept = self.front[-1], self._lowest()
        found = [] if kept is None else [kept]
        if kept is not None and kept.nbytes > fewest.nbytes:
            pairs = zip(kept.buffers, fewest.buffers, strict=True)
            other = self._lowest([own - least for own, least in pairs])
            found += [] if other is None else [other]
        least = min(variant.need for variant in self.lowest_of_front)
        yield from (variant for variant in map(self.of, found) if variant.need < least)

    def _lowest(self, without: Sequence[frozenset[int]] = ()) -> Kept | None:
        held = self.held
        for _ in range(PARAMS.budget_tries):
            kept = choose(self.loops, self.machine, None, True, (), held, without)
            if kept is None or (more := held.with_most(kept)) == held:
                break
            held = more
        return kept

    def choose(self, limit: int) -> Kept | None:
        if self.are_divisible:
            return self.in_segments.within(limit)
        return choose(self.loops, self.machine, limit)

    @functools.cached_property
    def in_segments(self) -> Divided:
        return Divided(self.loops, self.machine)

    def divided(self) -> Iterator[LoopVariant]:
        """The loops in segments, with the fewest bytes in stacks, where that is of use. A further
        level takes longer, so it has to need noticeably less."""
        best: LoopVariant | None = None
        levels = self.in_segments.by_levels() if self.are_divisible else ()
        for kept in levels:
            if kept.segments is None:
                continue
            if best is not None:  # a level changes what is stacked, and next to nothing else
                gain = best.kept.nbytes - kept.nbytes
                if gain < PARAMS.level_gain * best.need:
                    break
            variant = self.of(kept)
            if best is not None and variant.need > (1 - PARAMS.level_gain) * best.need:
                break
            best = variant
        if best is not None:
            yield best

    def near(self, budget: int, found: Sequence[LoopVariant]) -> Iterator[LoopVariant]:
        """What needs `budget` bytes as nearly as can be, if it is between two of `found`."""
        needs = [*(v.need for v in found), *map(self.least, self.front)]
        under = [v for v in found if v.need <= budget]
        if max(needs) <= budget or not under:
            return
        before = max(under, key=lambda v: v.need)
        limit = before.kept.nbytes + budget - before.need
        for _ in range(PARAMS.budget_tries):
            kept = self.choose(limit)
            if kept is None or kept.seconds >= before.kept.seconds:
                return
            variant = self.of(kept)
            if variant.need <= budget:
                yield variant
                return
            limit = kept.nbytes - (variant.need - budget)
