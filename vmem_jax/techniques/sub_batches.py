"""sub_batches: the batch runs in parts, one after another, and their gradients are added up.

More sub-batches keep less live at once, but launch every kernel and read every weight more often.
moDNN (Chen et al., DATE 2018, section IV-A).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from vmem_jax import jax_compat as compat
from vmem_jax.capture import Captured
from vmem_jax.capture.batch import Batch, Mixing, follow_batch
from vmem_jax.capture.locations import location_of
from vmem_jax.capture.sub_batches import SubBatches as Division
from vmem_jax.capture.sub_batches import totals_nbytes
from vmem_jax.core.costs import Costs, of_parts
from vmem_jax.core.liveness import step_nbytes
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Program
from vmem_jax.errors import SubBatchError
from vmem_jax.jax_compat import ClosedJaxpr
from vmem_jax.policy.base import Splitting
from vmem_jax.policy.convolving import fastest, smallest_workspaces
from vmem_jax.policy.sub_batch import Needed, needed, sub_batch_size
from vmem_jax.search.variant import Variant
from vmem_jax.techniques.base import AbstractTechnique, Form
from vmem_jax.techniques.context import StepContext
from vmem_jax.tracing.traced import TracedStep


class SubBatches(AbstractTechnique):
    """The batch in parts."""

    name: ClassVar[str] = "sub_batches"
    verb: ClassVar[str] = "run in sub-batches"

    def unusable(self, step: StepContext) -> str:
        settings = step.settings
        if settings.sub_batches is not None:
            return ""
        if settings.policy.splitting is Splitting.WHOLE:
            return f"policy `{settings.policy.name}` plans the batch as a whole"
        return parts_of(step).why

    def adapt(self, step: StepContext, form: Form) -> Form:
        """Replaces the costs by those of one sub-batch."""
        if form.count == 1:
            return form
        return dataclasses.replace(form, costs=_part_costs(step, form.traced))


@dataclasses.dataclass(frozen=True)
class Parts:
    """The numbers of sub-batches in which a step may run.

    Attributes:
      counts: the numbers, in rising order.
      into: number -> the step in so many sub-batches; and samples of each, where they are not as
        even as they can be.
      why: why it must run whole, for people; "" if it need not.
      samples: of the batch; 0 where it must run whole.
    """

    counts: Sequence[int]
    into: Callable[..., TracedStep]
    why: str = ""
    samples: int = 0

    def between(self, fewer: int, more: int) -> int:
        """A number of sub-batches halfway between two; 0 if none has another size than theirs.

        Sub-batches are as even as they can be, so 96 of 128 samples would be the same as 64.
        """
        size = -(-self.samples // ((fewer + more) // 2))
        count = -(-self.samples // size)
        return count if fewer < count < more else 0


def parts_of(step: StepContext, count: int | None = None) -> Parts:
    """The numbers of sub-batches in which `step` may run.

    Args:
      count: the only number wanted; by default that of `jit`, or all numbers worth trying.

    Raises:
      SubBatchError: the step cannot run in `count` sub-batches.
    """
    settings, traced = step.settings, step.traced
    count = settings.sub_batches if count is None else count
    if count == 1 or (count is None and settings.splitting is Splitting.WHOLE):
        return Parts((1,), lambda count: traced)
    found = _batch(step)
    if isinstance(found, str):
        if count is not None:
            raise SubBatchError(f"`{settings.name}` cannot run in {count} sub-batches: {found}.")
        return Parts((1,), lambda count: traced, found)
    cut = lambda: functools.cache(functools.partial(traced.in_sub_batches, found))
    into = step.cached("parts", cut)
    if count is not None:
        if count > found.size:
            raise SubBatchError(
                f"`{settings.name}` cannot run in {count} sub-batches: its batch has {found.size} "
                "samples."
            )
        return Parts((count,), into, samples=found.size)
    most = _most(step)
    counts = tuple(n for n in counts_of(found.size) if n <= most)
    why = ""
    if counts == (1,) and found.size > 1:
        why = "half of the batch takes less time than it takes to start one kernel"
    return Parts(counts, into, why, found.size)


def is_divisible(step: StepContext) -> bool:
    """Whether `step`, a form of the user's, can run in as many sub-batches as are asked for."""
    if (step.settings.sub_batches or 1) == 1:
        return True
    return not isinstance(_batch(step), str)


def least_in_parts(step: StepContext, count: int) -> int:
    """Bytes that every plan of `step` in `count` sub-batches, or in some of -`count` samples, needs:
    at least arguments, all totals, mostly gradients, and what the kernel that uses most of a batch
    uses of a sub-batch.

    It is 0 where that is not known: of one sub-batch, and where arguments are in host memory.
    """
    found = _batch(step)
    if isinstance(found, str) or step.traced.hosted or count in (1, -found.size):
        return 0
    captured = step.traced.captured
    totals = step.cached("totals", lambda: totals_nbytes(captured.divisible, found))
    largest = step.cached("largest", lambda: _largest_nbytes(captured, found))
    share = largest // count if count > 0 else largest * -count // found.size
    return captured.program.arguments_nbytes + totals + share


def _largest_nbytes(captured: Captured, batch: Batch) -> int:
    """Bytes of samples that one kernel of the whole batch uses at most."""
    program, values = captured.program, batch.values
    on_samples = lambda v: v in values and values[v].layout is not None
    among = {b for b, v in enumerate(captured.variables) if on_samples(v)}
    return max((step_nbytes(program, each, among) for each in program.steps), default=0)


def whole_limits(step: StepContext, budget: int | None) -> list[int]:
    """Bytes that a form of `step` may need as a whole for it to need `budget` in sub-batches, for
    each number of these that is tried: what each sub-batch may need beside arguments and totals,
    times their number, and these."""
    counts = parts_of(step).counts
    if budget is None or counts == (1,):
        return []
    least = least_in_parts(step, counts[-1])
    return [least + n * (budget - least) for n in counts if n > 1 and budget > least]


def by_size(
    parts: Parts, variant: Callable[[int], Variant], budget: int
) -> tuple[tuple[int, ...], Callable[[int], Variant]]:
    """The sizes of sub-batches for a policy that takes the largest that fits into `budget` bytes, and
    the variant of each; in samples, negative, so that they rise.

    First that of equation 3 of moDNN (`policy.sub_batch`), with room for the fastest convolutions, or
    at least for those of the smallest workspaces; a smaller sub-batch has what is left. XLA may need
    more than predicted, so the even sizes of `parts.counts` follow. Where no size fits, it is all of
    them, for the lowest peak: sums of gradients may take more than smaller sub-batches save.

    Args:
      variant: samples -> the step in sub-batches of so many.
    """
    batch = parts.samples
    least = -(-batch // parts.counts[-1])

    def need(samples: int, choose: Callable[..., Any]) -> Needed:
        one = variant(samples)
        return needed(one.program, choose(one.costs.convolutions))

    found = (
        sub_batch_size(functools.partial(need, choose=choose), batch, budget)
        for choose in (fastest, smallest_workspaces)
    )
    samples = max(next(filter(None, found), batch), least)
    even = (-(-batch // count) for count in parts.counts)
    sizes = [samples, *(size for size in even if size < samples)]
    return tuple(-size for size in sizes), lambda size: variant(-size)


def _most(step: StepContext) -> float:
    """The most sub-batches such that one takes at least `LEAST_BUSY` launches."""
    launch = step.machine.launch
    return step.machine.most_parts(sum(max(each - launch, 0.0) for each in step.costs.seconds))


def counts_of(size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, … up to `size` samples; a power of two is replaced by the next divisor of `size`,
    if there is one below the next power."""
    powers = (2**n for n in range(size.bit_length()))
    divisor = lambda n: size % n == 0
    return tuple(next(filter(divisor, range(p, min(2 * p, size + 1))), p) for p in powers)


def _part_costs(step: StepContext, parts: TracedStep) -> Costs:
    """Costs of `step` in sub-batches, from those of the whole batch.

    A step of the Program stands for all sub-batches, and so does a transfer: the link is slower by
    their number. A smaller one counts as much as its share of samples.
    """
    whole, costs = step.traced.captured.program, step.costs
    found = of_parts(parts.captured.program, step.machine, whole, costs)
    link, division = costs.link, parts.captured.sub_batches
    assert division is not None
    count: float = division.count
    if division.smaller is not None:
        count -= 1 - division.smaller_size / division.size
        found = _with_a_smaller_one(parts.captured.program, step.machine, found, division)
    if link is not None and not parts.hosted:
        slower = {lane: getattr(link, lane) / count for lane in ("out", "into", "both")}
        link = dataclasses.replace(link, **slower)
    return dataclasses.replace(found, link=link)


def _with_a_smaller_one(
    program: Program, machine: Machine, costs: Costs, division: Division
) -> Costs:
    """`costs`, in which every sub-batch takes as long, with one of fewer samples."""
    share = division.smaller_size / division.size
    seconds = []
    for step, each in zip(program.steps, costs.seconds, strict=True):
        if step.times > 1:
            once = dataclasses.replace(step, times=1)
            part = lambda whole: int(share * whole)
            flops, nbytes, written = map(part, (step.flops, step.nbytes, step.written))
            less = dataclasses.replace(once, flops=flops, nbytes=nbytes, written=written, body=())
            full = machine.seconds(dataclasses.replace(once, body=()))
            each *= (division.count - 1 + machine.seconds(less) / full) / division.count
        seconds.append(each)
    return dataclasses.replace(costs, seconds=tuple(seconds))


def _batch(step: StepContext) -> Batch | str:
    """The batch of `step`, or why it cannot be divided."""
    return step.cached("batch", lambda: _follow(step.traced))


def _follow(traced: TracedStep) -> Batch | str:
    """The batch dimension of every value; or why the batch cannot run in parts."""
    if traced.batch.why:
        return traced.batch.why
    if traced.captured.program.opened:
        return "its loop is planned inside"
    if traced.captured.shards.device_count > 1:
        return "it runs on several devices"
    flat = traced.captured.divisible
    found = follow_batch(flat, traced.batch.layouts, traced.batch.size)
    return found if isinstance(found, Batch) else _said(flat, found)


def _said(flat: ClosedJaxpr, mixing: Mixing) -> str:
    eqns = compat.open_jaxpr(flat).eqns
    if mixing.mixer < 0:
        return mixing.why
    if mixing.why:
        return f"{location_of(eqns[mixing.mixer])}: {mixing.why}"
    mixer = f"{location_of(eqns[mixing.mixer])} needs all samples at once"
    if mixing.reader in (-1, mixing.mixer):
        return mixer
    return f"{mixer}, and {location_of(eqns[mixing.reader])} waits for it sample by sample"
