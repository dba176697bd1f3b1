"""carried: a 1×1 convolution with what stands around it, as a JAX primitive.

On an NVIDIA GPU it is one kernel (`conv.products`), where one is known for its widths;
elsewhere XLA's passes. Its operands and results are those of the step: images, channels last, and
kernels as the convolutions take and give them.

Neither cuDNN (9.19) nor CUTLASS (4.2.0) has convolutions in bfloat16 with a scale, a bias and a ReLU
of the operand: CUTLASS's compute these by `fma.rn.f16x2.relu` on the bits of whatever type they are
made for (`FpropScaleBiasReluTransform`, `WgradScaleBiasReluTransform`). 3×3 convolutions in bfloat16
read what a pass has normalised.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jexc

from vmem_jax.capture.convolutions import Matched
from vmem_jax.conv.elementwise import Elementwise
from vmem_jax.conv.products import Around, Made, Operands, Tiling, by_passes, in_tiles
from vmem_jax.conv.triton import register
from vmem_jax.core.cards import CARDS
from vmem_jax.core.convolution import Pass

carried_p = jexc.Primitive("carried_product")
carried_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """What the primitive computes. Its operands are, in order: rows, vectors, result rows, result
    vectors, and the kernel of the convolution.

    Attributes:
      matched: the convolution as a pass of a layer.
      gradient: the gradient to its weight, as the pass of that layer; None without one.
      before, behind: what makes the operand, and what is made of the result: x where there is a
        gradient, `results` values that are stored, then those that are summed.
      stores: whether the operand is stored.
      results: how many values are stored of what is behind.
      sums: the types of the sums.
    """

    matched: Matched
    gradient: Matched | None
    before: Elementwise
    behind: Elementwise
    stores: bool
    results: int
    sums: tuple[Any, ...]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Rows, channels of the operand and of the result."""
        c = self.matched.convolution
        ends = c.features_in, c.features_out
        backward = c.which == Pass.BACKWARD_DATA
        return (math.prod(self.shape[:-1]), *(ends[::-1] if backward else ends))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the operand, images."""
        return self.before.made[0].aval.shape

    @property
    def flops(self) -> int:
        """Of its products."""
        rows, a, b = self.widths
        return 2 * rows * a * b * (1 if self.gradient is None else 2)

    @property
    def tiling(self) -> Tiling | None:
        """That of its kernel; None where XLA's passes do it."""
        known = self._known
        return None if known is None else known.tiling

    @property
    def efficiency(self) -> float:
        """The share of a convolution's rate that its kernel reaches; 1 for XLA's passes."""
        known = self._known
        return 1.0 if known is None else known.flops / _CONVOLVING

    @property
    def _known(self) -> Known | None:
        wide = len(self.before.rows), len(self.behind.rows)
        return known_for(*self.widths, *wide, self.gradient is not None)

    @property
    def workspace(self) -> int:
        """Bytes of what each program of its kernel sums."""
        _, a, b = self.widths
        tiling = self.tiling
        if tiling is None:
            return 0
        gradient = 0 if self.gradient is None else a * b
        return 4 * tiling.programs * (gradient + len(self.sums) * b)


@dataclasses.dataclass(frozen=True)
class Known:
    """A kernel that was timed.

    Attributes:
      tiling: how it is divided.
      flops: operations of its products a second, on an H200.
    """

    tiling: Tiling
    flops: float


KNOWN = {
    # channels of the operand and of the result, arrays of either width that are read, both products
    (64, 256, 1, 0, False): Known(Tiling(32, 256, 396, 4, 3), 142e12),
    (128, 512, 1, 0, False): Known(Tiling(32, 256, 132, 8, 3), 204e12),
    (256, 64, 1, 0, False): Known(Tiling(32, 64, 264, 4, 3), 190e12),
    (256, 64, 2, 0, False): Known(Tiling(32, 64, 132, 4, 3), 75e12),
    (256, 64, 2, 1, True): Known(Tiling(32, 64, 132, 8, 3), 123e12),
    (64, 256, 2, 3, True): Known(Tiling(64, 256, 132, 8, 1), 79e12),
}
"""Kernels that took at most 0.75 of the time of XLA's passes on an H200, with the same values: for so
many channels, and at most so many arrays that are read. With the one that took 0.85, 256 to 1,024
channels, ResNet-152 is slower: half of its memory takes 1.045 of plain's time on an H100, and 1.016
without. `benchmarks/results/h200_products.jsonl` has
the times, also of those that took longer, and of those for 512 channels whose values were wrong. One
array more can take three times as long: in a step on an H100 the last of them took 0.78 ms, and 2.28
with a fourth array and five sums. An H100, with 0.72 of the bandwidth, takes 0.9 to 1.3 of an H200's
times for the others: it is not bandwidth that bounds them."""

_CONVOLVING = CARDS["h200"].machine.convolutions["bfloat16"]

_TURNS = 7
"""The fewest tiles for each program of these kernels: with fewer, some wait for the others a sixth of
the time. Those that were timed took 47 or more."""


def known_for(
    rows: int, a: int, b: int, wide: int, result_wide: int, gradient: bool
) -> Known | None:
    """The kernel of a product of `rows` and (a, b); None where none is known to be faster than
    passes.

    Args:
      wide, result_wide: how many arrays of either width it reads.
    """
    fits = [
        (known_wide + known_result, known)
        for (known_a, known_b, known_wide, known_result, has), known in KNOWN.items()
        if (known_a, known_b, has) == (a, b, gradient)
        and known_wide >= wide
        and known_result >= result_wide
        and rows >= _TURNS * known.tiling.programs * known.tiling.rows
        and not rows % known.tiling.rows
    ]
    return min(fits, key=lambda fit: fit[0], default=(0, None))[1]


def carried(carried: Carried, *operands: jax.Array) -> list[jax.Array]:
    """Runs `carried`; returns the operand, if it is stored, the results, the sums, and the gradient
    to the weight, as the equations that it stands for do."""
    return carried_p.bind(*operands, carried=carried)


@carried_p.def_abstract_eval
def _abstract(*operands: Any, carried: Carried) -> list[Any]:
    del operands
    shaped = lambda v: jax.core.ShapedArray(v.aval.shape, v.aval.dtype)
    start = 0 if carried.gradient is None else 1
    found = [shaped(carried.before.made[0])] if carried.stores else []
    found += map(shaped, carried.behind.made[start : start + carried.results])
    found += carried.sums
    if carried.gradient is not None:
        c = carried.gradient.convolution
        shape = (c.features_out, *c.kernel, c.features_in)
        like = jax.ShapeDtypeStruct(shape, c.dtype)
        made = jax.eval_shape(carried.gradient.result, like)
        found.append(jax.core.ShapedArray(made.shape, made.dtype))
    return found


def _operands(c: Carried, operands: Sequence[jax.Array]) -> Operands:
    *arrays, kernel = operands
    groups, start = [], 0
    for each in (c.before.rows, c.before.vectors, c.behind.rows, c.behind.vectors):
        groups.append(arrays[start : start + len(each)])
        start += len(each)
    rows, a, b = c.widths
    wide = lambda group, width: [x.reshape(rows, width) for x in group]
    thin = lambda group, width: [x.reshape(width) for x in group]
    weight = c.matched.kernel(kernel)
    weight = weight.reshape(weight.shape[0], -1)
    weight = weight if c.matched.convolution.which == Pass.BACKWARD_DATA else weight.T
    return Operands(
        weight, wide(groups[0], a), thin(groups[1], a), wide(groups[2], b), thin(groups[3], b)
    )


def _run(make: Any, *operands: jax.Array, carried: Carried) -> list[jax.Array]:
    c = carried
    given = _operands(c, operands)
    has = c.gradient is not None
    around = Around(
        lambda *arrays: c.before(*arrays) * (1 + c.stores),  # stored is the operand
        c.behind,
        stored=int(c.stores),
        results=c.results,
        has_gradient=has,
    )
    stored, sums, gradient = make(around, given)
    shapes = [c.shape] if c.stores else []
    start = 1 if has else 0
    shapes += [v.aval.shape for v in c.behind.made[start : start + c.results]]
    found = [x.reshape(shape) for x, shape in zip(stored, shapes, strict=True)]
    found += [x.astype(like.dtype) for x, like in zip(sums, c.sums, strict=True)]
    if c.gradient is not None and gradient is not None:
        g = c.gradient.convolution
        shape = (g.features_out, *g.kernel, g.features_in)
        found.append(c.gradient.result(gradient.T.astype(g.dtype).reshape(shape)))
    return found


def _on_cuda(*operands: jax.Array, carried: Carried) -> list[jax.Array]:
    tiling = carried.tiling
    make: Any = by_passes if tiling is None else functools.partial(in_tiles, tiling=tiling)
    return _run(make, *operands, carried=carried)


register(carried_p, functools.partial(_run, by_passes), _on_cuda)

__all__ = ["Carried", "Elementwise", "Made", "carried", "carried_p", "known_for"]
