"""dilated_convolutions: dilated kernels and the gradients to them, written as XLA:GPU knows them.

cuDNN has dilated kernels. But XLA (0.11.2) writes one with the zeros in between, and multiplies
these, where both sides are not padded alike: of a causal convolution's two taps that lie 512 apart
it makes 513. So such a convolution reads here what was padded before, behind a barrier, since XLA
takes the padding back otherwise.

The gradient to a dilated kernel XLA takes for a forward convolution with kernels as large as images.
Positions that lie a dilation apart meet each other alone. So each set of these is a sample of its
own here, and the gradient is that of a dense kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
from jax import lax

from vmem_jax.capture.convolutions import sums_samples
from vmem_jax.capture.editor import spliced
from vmem_jax.capture.primitives import shape_of
from vmem_jax.capture.transposed_convolutions import Spreading, known_by_xla
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var

MISREAD = 13
"""How many times as long as a gradient to a dense kernel one to a dilated kernel takes that XLA does
not know: 3.24 ms of 0.25 (3 x 3 taps that lie 2 apart, 16 images of 64 x 64, 256 channels, bf16,
H200). Fewer channels take longer still: 3.9 ms of 0.13."""


def with_known_dilated(flat: ClosedJaxpr, platform: str) -> tuple[ClosedJaxpr, Spreading]:
    """`flat`, in which XLA knows dilated kernels and the gradients to them, and what these are.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
    """
    return known_by_xla(flat, platform, _Rule)


class _Rule:
    """What stands in place of each equation.

    Args:
      found: of the results of those in place of others how many times as long they took, to which it
        adds.
    """

    def __init__(self, found: dict[Var, int]) -> None:
        self.found = found
        self.known: dict[tuple[Atom, _Sets], Var] = {}

    def __call__(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        if eqn.primitive.name != "conv_general_dilated" or {*eqn.params["lhs_dilation"]} != {1}:
            return [eqn]
        return self._of_kernel(eqn) if sums_samples(_numbers(eqn)) else self._forward(eqn)

    def _forward(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """`eqn` that reads what is padded, if its kernel is dilated and its sides are not padded
        alike."""
        numbers, pads = _numbers(eqn), eqn.params["padding"]
        [x, kernel], [out] = eqn.invars, eqn.outvars
        taps = [shape_of(kernel)[d] for d in numbers.rhs_spec[2:]]
        filled = [by * (k - 1) + 1 for by, k in zip(eqn.params["rhs_dilation"], taps, strict=True)]
        alike = all(low == high >= 0 for low, high in pads)
        if alike or filled == taps or 0 in shape_of(out):
            return [eqn]
        around = [(0, 0, 0)] * len(numbers.lhs_spec)
        for d, (low, high) in zip(numbers.lhs_spec[2:], pads, strict=True):
            around[d] = low, high, 0

        def padded(x: jax.Array) -> jax.Array:
            return lax.optimization_barrier(lax.pad(x, lax.full((), 0, x.dtype), around))

        pads_x, larger = spliced(padded, [x], eqn)
        self.found[out] = -(-math.prod(filled) // math.prod(taps))
        params = {**eqn.params, "padding": ((0, 0),) * len(taps)}
        return [*pads_x, eqn.replace(invars=[larger, kernel], params=params)]

    def _of_kernel(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """`eqn`, if it is the gradient to a dilated kernel, as that to a dense one."""
        numbers, params = _numbers(eqn), eqn.params
        [x, dy], [out] = eqn.invars, eqn.outvars
        taps = [shape_of(out)[d] for d in numbers.out_spec[2:]]
        dilation = tuple(
            by if k > 1 else 1 for by, k in zip(params["window_strides"], taps, strict=True)
        )
        is_strided = {*params["rhs_dilation"]} != {1}
        if {*dilation} == {1} or is_strided or params["feature_group_count"] > 1 or 0 in taps:
            return [eqn]
        sizes = [shape_of(dy)[d] for d in numbers.rhs_spec[2:]]
        each = [*zip(sizes, dilation, taps, strict=True)]
        rows = [max(-(-size // by), k + 1) for size, by, k in each]  # or XLA misreads it again
        lows = tuple(low for low, _ in params["padding"])
        read = tuple(n + k - 1 for n, k in zip(rows, taps, strict=True))
        of_x = _Sets(numbers.lhs_spec[1], tuple(numbers.lhs_spec[2:]), dilation, lows, read)
        none = (0,) * len(rows)
        of_dy = _Sets(numbers.rhs_spec[1], tuple(numbers.rhs_spec[2:]), dilation, none, (*rows,))
        first, x = self._apart(of_x, x, eqn)
        second, dy = self._apart(of_dy, dy, eqn)
        self.found[out] = MISREAD
        dense = {"window_strides": (1,) * len(rows), "padding": ((0, 0),) * len(rows)}
        return [*first, *second, eqn.replace(invars=[x, dy], params={**params, **dense})]

    def _apart(self, sets: _Sets, x: Atom, eqn: JaxprEqn) -> tuple[list[JaxprEqn], Var]:
        """The equations that make `sets` of `x`, none where others have, and what they make."""
        if (x, sets) in self.known:
            return [], self.known[x, sets]
        eqns, self.known[x, sets] = spliced(sets.apart, [x], eqn)
        return eqns, self.known[x, sets]


@dataclasses.dataclass(frozen=True)
class _Sets:
    """Positions that lie a dilation apart, as samples of their own.

    Attributes:
      samples: the dimension of samples.
      space: the spatial dimensions.
      dilation: along each of these.
      before: zeros in front of each; fewer than none cut off.
      rows: of each set along each.
    """

    samples: int
    space: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    rows: tuple[int, ...]

    def apart(self, x: jax.Array) -> jax.Array:
        """`x` with its sets, those of one sample side by side."""
        around = [(0, 0, 0)] * x.ndim
        for d, by, low, rows in self._each():
            around[d] = low, rows * by - low - x.shape[d], 0
        x = lax.pad(x, lax.full((), 0, x.dtype), around)
        split = {d: (rows, by) for d, by, _, rows in self._each()}
        sizes = [split.get(d, (size,)) for d, size in enumerate(x.shape)]
        order = [sum(map(len, sizes[:d])) for d in range(x.ndim)]
        between = [order[d] + 1 for d in self.space]
        order[self.samples + 1 : self.samples + 1] = between
        x = x.reshape(sum(sizes, ())).transpose(order)
        last = self.samples + len(self.space) + 1
        one = math.prod(x.shape[self.samples : last])
        return x.reshape(*x.shape[: self.samples], one, *x.shape[last:])

    def _each(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(self.space, self.dilation, self.before, self.rows, strict=True)


def _numbers(eqn: JaxprEqn) -> lax.ConvDimensionNumbers:
    numbers: lax.ConvDimensionNumbers = eqn.params["dimension_numbers"]
    return numbers
