"""compress: removes the zeros of values that wait for the backward pass. Used only if `allow` names
it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from vmem_jax import jax_compat as compat
from vmem_jax.core.compression import compressed_nbytes
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.policy.base import Infeasible
from vmem_jax.profile.density import densities
from vmem_jax.rewrite.compression import compressed, compressible, rectified, slices_of
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.search.estimate import estimate
from vmem_jax.search.log import SearchLog
from vmem_jax.search.params import SearchParams
from vmem_jax.search.variant import Variant
from vmem_jax.techniques.base import AbstractTechnique
from vmem_jax.techniques.context import StepContext
from vmem_jax.techniques.params import PARAMS
from vmem_jax.tracing.traced import TracedStep
from vmem_jax.transfer import compression, ffi


class Compress(AbstractTechnique):
    """Compression of values that wait for the backward pass."""

    name: ClassVar[str] = "compress"
    verb: ClassVar[str] = "compress"

    def unusable(self, step: StepContext) -> str:
        if self.name not in step.settings.named:
            return "`allow` does not name it"
        traced, density = step.traced, step.settings.density
        why = ffi.unusable(step.platform, step.devices, traced.captured.shards.mesh, step.inlined)
        why = why or compression.unusable(step.platform)
        if len(step.devices) > 1:
            return f"it runs on {len(step.devices)} devices"
        if density is None and not (step.leaves and all(map(compat.is_array, step.leaves))):
            return "its arguments are shapes alone, which tell no zeros: call it, or give `density`"
        if density is None and traced.hosted:
            return "some of its arguments are in host memory: give `density`"
        if not why and step.target is None:
            why = compression.cannot_overflow(step.devices[0])
        return why


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A variant, and the rank of its plan: (False, seconds) if it fits, else (True, bytes)."""

    variant: Variant
    traced: TracedStep
    plan: Plan
    rank: tuple[bool, float]


def compressing(
    step: StepContext,
    make: Any,
    budget: int | None,
    params: SearchParams,
    log: SearchLog,
) -> tuple[list[Variant], str]:
    """The variants of `step` with compressed values, the best by prediction first, among them the one
    that compresses nothing; or that one alone, and why.

    Three choices are tried: the values that the plan without compression moves; these and what then
    moves besides; all values that can be compressed. A policy that compresses all that it moves has
    the first two alone; where its plan moves nothing, that is what it moves for a byte less, since
    the plan may compile to more than predicted.

    Args:
      make: StepContext -> its variant with the batch as a whole.
      budget: bytes.
    """
    settings, always = step.settings, step.settings.policy.compresses

    def tried(context: StepContext) -> _Choice:
        variant = make(context)
        found = estimate(variant, budget, params, log)
        pinned = layout_of(variant.program, found.plan).nbytes if found.plan.moves else 0
        rank = (False, found.plan.predicted_seconds)
        for need, limit in ((found.need, budget), (pinned, settings.host_budget)):
            if limit is not None and need > limit:
                rank = (True, need)
        return _Choice(variant, context.traced, found.plan, rank)

    best = tried(step)
    fits, seconds = not best.rank[0], sum(best.variant.costs.seconds)
    if fits and not always and best.rank[1] <= PARAMS.fast_enough * seconds:
        return [best.variant], "it fits without, and is as fast as it can be"
    sizes, why = compressed_sizes(step.traced, step.leaves, settings.density, budget)
    if not sizes:
        return [best.variant], why
    with_some = lambda some: tried(step.of(with_compressed(step.traced, sizes, some)))
    found, some = best, frozenset[int]()
    choices = [best] if not always or not best.plan.transfers else []
    buffer_of = {v: b for b, v in enumerate(step.traced.captured.variables)}
    while True:
        variables = found.traced.captured.variables
        transfers = found.plan.transfers or (_moved_next(found) if always else ())
        moved = {buffer_of.get(variables[t.buffer], -1) for t in transfers}
        more = some | (moved & sizes.keys())
        if more == some:
            break
        some = more
        found = with_some(some)
        choices.append(found)
    if some != sizes.keys() and not always:
        choices.append(with_some(sizes.keys()))
    choices = sorted(choices or [best], key=lambda choice: choice.rank)
    if not choices[0].variant.program.compressed and (len(choices) == 1 or not always):
        why = "no plan is predicted to be better with it"
    return [choice.variant for choice in choices[: PARAMS.compressed_choices]], why


def compressing_loops(contexts: Sequence[StepContext], limit: int | None) -> Iterator[StepContext]:
    """Those of `contexts` with stacks that can be compressed, and with all of these compressed.

    Args:
      limit: bytes of device memory that counting zeros may need.
    """
    for step in contexts:
        captured = step.traced.captured
        if captured.program.segments is not None:
            continue  # most of their stacks are made again, a segment at a time
        sizes, _ = compressed_sizes(step.traced, step.leaves, step.settings.density, limit)
        stacks = [b for b in sizes if slices_of(captured, b) > 1]
        if stacks:
            yield step.of(with_compressed(step.traced, sizes, stacks))


def _moved_next(choice: _Choice) -> tuple[Transfer, ...]:
    """What the plan of `choice`, which moves nothing, would move if its peak were too high."""
    variant = choice.variant
    found = variant.policy.plan(variant.program, variant.costs, choice.plan.predicted_peak - 1)
    plan = found.plan if isinstance(found, Infeasible) else found
    return plan.transfers


def compressed_sizes(
    traced: TracedStep, leaves: Sequence[Any], density: float | None, limit: int | None
) -> tuple[dict[int, int], str]:
    """Buffers of `traced` and how many bytes each takes when compressed; and why there are none.

    Args:
      leaves: the arguments.
      density: of what ReLUs and masks leave, from 0 to 1; None to count the zeros of every residual
        on `leaves`.
      limit: bytes of device memory that counting may need.
    """
    captured = traced.captured
    found = compressible(captured, PARAMS.compressed_part)
    slices = {b: slices_of(captured, b) for b in found}
    old = compression.unusable_in_loops() if max(slices.values(), default=1) > 1 else ""
    if old:
        found = tuple(b for b in found if slices[b] == 1)
    if density is not None:
        known = dict.fromkeys(rectified(captured, found), density)
    else:
        counted = densities(captured, found, leaves, limit, [slices[b] for b in found])
        if isinstance(counted, str):
            return {}, f"{counted}; `density` would spare it that"
        known = counted
    sizes = {}
    for b, share in known.items():
        aval: Any = captured.variables[b].aval
        room, count = min(share * (1 + PARAMS.capacity_margin), 1.0), slices[b]
        nbytes = count * compressed_nbytes(aval.size // count, aval.dtype.itemsize, room)
        if nbytes <= PARAMS.compressed_share * captured.program.buffers[b].nbytes:
            sizes[b] = nbytes
    if sizes:
        return sizes, ""
    if old:
        return {}, old
    emptiest = f": of the emptiest {min(known.values()):.0%} are none" if known else ""
    return {}, f"of its {len(found)} large residuals none has enough zeros{emptiest}"


def with_compressed(
    traced: TracedStep, sizes: Mapping[int, int], some: Collection[int]
) -> TracedStep:
    """`traced` with the buffers `some` compressed, each into as many bytes as `sizes` has."""
    pairs = [(b, sizes[b]) for b in some]
    return dataclasses.replace(traced, captured=compressed(traced.captured, pairs))
