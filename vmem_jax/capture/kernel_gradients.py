"""kernel_gradients: gradients to depthwise kernels, written so that XLA:GPU knows what they are.

XLA tells such a gradient from a forward convolution by its window, which is the gradient to y: where
that is no larger than the result in some dimension, it takes it for a forward convolution of few
images with large kernels. 7 x 7 kernels on 7 x 7 images (ConvNeXt's last stage) take 2.06 ms so on an
H100, and 0.11 on 14 x 14 ones, four times the work. Zeros around the gradient to y make it larger;
they add nothing to the sums.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vmem_jax.capture.convolutions import match
from vmem_jax.capture.editor import spliced, with_each_replaced
from vmem_jax.core.convolution import Convolution, Pass
from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Program
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn

MISREAD = 24
"""How many times as long the misread gradient takes as is predicted with the zeros: 2.06 ms of 0.086
(7 x 7 kernels on 128 images of 7 x 7 and 1,024 channels, bf16, H100)."""


def with_known_kernel_gradients(
    flat: ClosedJaxpr, platform: str
) -> tuple[ClosedJaxpr, frozenset[Convolution]]:
    """`flat`, in which XLA misreads no gradient to a depthwise kernel; and those that it would have.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
    """
    if platform != "gpu":
        return flat, frozenset()
    found: set[Convolution] = set()
    known = with_each_replaced(flat, lambda _: functools.partial(_known, found))
    return known, frozenset(found)


def as_misread(costs: Costs, program: Program, misread: frozenset[Convolution]) -> Costs:
    """`costs` of `program`, whose gradients XLA knows, for the step as it was written."""
    if not misread:
        return costs
    longer = (MISREAD if step.convolution in misread else 1 for step in program.steps)
    seconds = tuple(map(operator.mul, costs.seconds, longer))
    return dataclasses.replace(costs, seconds=seconds)


def _known(found: set[Convolution], eqn: JaxprEqn) -> list[JaxprEqn]:
    """`eqn`, or what XLA does not misread in its place, which is added to `found`."""
    zeros = _zeros(eqn)
    if not zeros:
        return [eqn]
    *padded, gradient = _padded(eqn, zeros)
    if matched := match(gradient, {}):
        found.add(matched.convolution)
    return [*padded, gradient]


def _zeros(eqn: JaxprEqn) -> tuple[int, ...]:
    """For each dimension the zeros on either side of a window that make it larger than the result; ()
    where XLA does not misread `eqn`."""
    matched = match(eqn, {})
    if matched is None or any(d != 1 for d in eqn.params["rhs_dilation"]):
        return ()
    c, numbers = matched.convolution, eqn.params["dimension_numbers"]
    if c.which != Pass.BACKWARD_FILTER or not c.groups == c.features_in > 1:
        return ()
    window, result = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    sides = zip(numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    zeros = tuple(max(0, (result[y] - window[k]) // 2 + 1) for k, y in sides)
    return zeros if any(zeros) else ()


def _padded(eqn: JaxprEqn, more: Sequence[int]) -> list[JaxprEqn]:
    """The equations of `eqn` with `more` zeros around its window, and as many around the input."""
    numbers = eqn.params["dimension_numbers"]
    [_, window] = eqn.invars
    around = [(0, 0)] * window.aval.ndim
    for k, zeros in zip(numbers.rhs_spec[2:], more, strict=True):
        around[k] = zeros, zeros
    pads: Any = eqn.params["padding"]
    pads = tuple((a + n, b + n) for (a, b), n in zip(pads, more, strict=True))

    def pad(y: jax.Array) -> jax.Array:
        return jnp.pad(y, around)

    padded, larger = spliced(pad, [window], eqn)
    gradient = eqn.replace(invars=[eqn.invars[0], larger], params={**eqn.params, "padding": pads})
    return [*padded, gradient]
