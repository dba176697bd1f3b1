"""passes: a step whose overlapping max-pools are one kernel each, with their index, and in which one
pass makes several sums; as a whole, and behind the division into sub-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.pooling import Pooling, find_pooling
from vmem_jax.capture.sub_batches import twins
from vmem_jax.capture.summing import Summing, find_summing
from vmem_jax.jax_compat import ClosedJaxpr
from vmem_jax.rewrite import pooling, summing


def with_passes(
    flats: Sequence[ClosedJaxpr], on_gpu: bool
) -> tuple[Sequence[ClosedJaxpr], Mapping[str, int]]:
    """`flats`, which have the same equations on other shapes, with pools and sums replaced as the
    first of them can be, and how many are, by fields of `Program`.

    Args:
      on_gpu: whether only those are replaced that have a kernel; where another of `flats` has none,
        XLA's passes do it.
    """
    flats, pooled = replaced(flats, _pools(flats[0], on_gpu), pooling.with_pooling)
    flats, summed = replaced(flats, _sums(flats[0], on_gpu), summing.with_summing)
    return flats, {"pooled": pooled, "summed": summed}


def replaced(
    flats: Sequence[ClosedJaxpr],
    found: Sequence[Any],
    replace: Callable[[ClosedJaxpr, Sequence[Any]], ClosedJaxpr],
) -> tuple[Sequence[ClosedJaxpr], int]:
    """`flats` with `found`, in the first of them, replaced in all, and how many that are."""
    if not found:
        return flats, 0
    every = (twins(flats[0], flat) for flat in flats)
    made = [
        replace(flat, [each.of(twin) for each in found])
        for flat, twin in zip(flats, every, strict=True)
    ]
    return made, len(found)


def _pools(flat: ClosedJaxpr, on_gpu: bool) -> list[Pooling]:
    eqns = compat.open_jaxpr(flat).eqns
    described = ((each, pooling.describe(each, eqns)) for each in find_pooling(flat))
    both = lambda pooled: [pooled.tiling, pooled.spread.tiling]
    fits = lambda pooled: pooled is not None and not (on_gpu and None in both(pooled))
    return [each for each, pooled in described if fits(pooled)]


def _sums(flat: ClosedJaxpr, on_gpu: bool) -> list[Summing]:
    eqns = compat.open_jaxpr(flat).eqns
    fits = lambda each: not on_gpu or summing.describe(each, eqns).tiling is not None
    return [each for each in find_summing(flat) if fits(each)]
