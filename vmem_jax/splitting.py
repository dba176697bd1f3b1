"""Whether the batch of a traced step can run in sub-batches, and in how many."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from vmem_jax import jax_compat as compat
from vmem_jax.capture.batch import Batch, Mixing, follow_batch
from vmem_jax.capture.places import place_of
from vmem_jax.core.costs import Costs, Machine, machine_for, of_parts
from vmem_jax.entry import Traced
from vmem_jax.errors import SubBatchError
from vmem_jax.jax_compat import ClosedJaxpr
from vmem_jax.prove.device import devices_of


@dataclasses.dataclass(frozen=True)
class Splits:
    """In how many sub-batches a step may run.

    Attributes:
      counts: how many, in rising order.
      into: the step in so many.
      why: why it runs as a whole alone, for people; "" where it need not.
    """

    counts: Sequence[int]
    into: Callable[[int], Traced]
    why: str = ""


def splits(name: str, traced: Traced, asked: int | None) -> Splits:
    """In how many sub-batches `traced`, a step called `name`, may run.

    Args:
      asked: how many there must be; None for all that are worth a try.

    Raises:
      SubBatchError: there cannot be so many.
    """
    if asked == 1:
        return Splits((1,), lambda count: traced)
    found = _follow(traced)
    if isinstance(found, str):
        if asked is not None:
            raise SubBatchError(f"`{name}` cannot run in {asked} sub-batches: {found}.")
        return Splits((1,), lambda count: traced, found)
    into = functools.cache(functools.partial(traced.in_sub_batches, found))
    if asked is not None:
        if asked > found.size:
            raise SubBatchError(
                f"`{name}` cannot run in {asked} sub-batches: its batch has {found.size} samples."
            )
        return Splits((asked,), into)
    return Splits(counts_of(found.size), into)


def counts_of(size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, … up to `size` samples; a divisor of that stands for the power of two below it."""
    powers = (2**n for n in range(size.bit_length()))
    divisor = lambda n: size % n == 0
    return tuple(next(filter(divisor, range(p, min(2 * p, size + 1))), p) for p in powers)


def part_costs(
    parts: Traced, whole: Traced, costs: Costs, machine: Machine | None, target: str | None
) -> Costs:
    """Costs of a step in sub-batches, from those of its batch as a whole.

    What moves within the loop does so for each part, as its steps run for each: so the link is slower
    by their number.

    Args:
      parts, whole: the step in sub-batches, and with its batch as a whole.
      costs: of the latter.
      machine: what to reckon with; by default the one of the device or `target`, by its name.
    """
    machine = machine or machine_for(target or devices_of(whole.avals)[0].device_kind)
    found = of_parts(parts.captured.program, machine, whole.captured.program, costs)
    link, count = costs.link, parts.captured.program.sub_batches
    if link is not None and not parts.hosted:
        slower = {way: getattr(link, way) / count for way in ("out", "into", "both")}
        link = dataclasses.replace(link, **slower)
    return dataclasses.replace(found, link=link)


def _follow(traced: Traced) -> Batch | str:
    """The step by samples; or why its batch cannot run in parts."""
    if traced.batch.why:
        return traced.batch.why
    if traced.captured.shards.device_count > 1:
        return "it runs on several devices"
    found = follow_batch(traced.captured.separate, traced.batch.layouts, traced.batch.size)
    return found if isinstance(found, Batch) else _said(traced.captured.separate, found)


def _said(flat: ClosedJaxpr, mixing: Mixing) -> str:
    eqns = compat.open_jaxpr(flat).eqns
    if mixing.mixer < 0:
        return mixing.why
    if mixing.why:
        return f"{place_of(eqns[mixing.mixer])}: {mixing.why}"
    mixer = f"{place_of(eqns[mixing.mixer])} needs all samples at once"
    if mixing.reader in (-1, mixing.mixer):
        return mixer
    return f"{mixer}, and {place_of(eqns[mixing.reader])} waits for it sample by sample"
