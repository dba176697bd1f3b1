"""transposed_convolutions: `lax.conv_transpose` and its gradients, written as XLA:GPU knows them.

A transposed convolution spreads its input by its strides. cuDNN has it as the gradient of a strided
convolution to its input. But XLA (0.11.2) knows that by a kernel that is flipped, and nothing flips
this one: XLA writes the input with the zeros in between, and multiplies these. The gradient to its
kernel XLA takes for a forward convolution with kernels as large as images.

So the kernel is flipped twice here, and its gradient is that of the strided convolution, flipped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.convolutions import sums_samples
from vmem_jax.capture.editor import spliced, with_each_replaced
from vmem_jax.capture.primitives import shape_of
from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Program
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

Spreading = Mapping[Var, int]
"""Of the result of a convolution how many times its operations XLA does for it as it was written."""


def with_known_transposed(flat: ClosedJaxpr, platform: str) -> tuple[ClosedJaxpr, Spreading]:
    """`flat`, in which XLA knows transposed convolutions and their gradients, and what these are.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
    """
    return known_by_xla(flat, platform, _Rule)


def known_by_xla(
    flat: ClosedJaxpr,
    platform: str,
    rule: Callable[[dict[Var, int]], Callable[[JaxprEqn], list[JaxprEqn]]],
) -> tuple[ClosedJaxpr, Spreading]:
    """`flat` with what a rule gives in place of each equation, and what the rule says of the results
    of these.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
      rule: makes one, of what it is to add to.
    """
    if platform != "gpu":
        return flat, {}
    found: dict[Var, int] = {}
    return with_each_replaced(flat, lambda _: rule(found)), found


def as_spreading(
    costs: Costs, program: Program, eqns: list[JaxprEqn], spreading: Spreading
) -> Costs:
    """`costs` of `program`, of whose convolutions XLA knows what they are, for the step as it was
    written.

    Args:
      eqns: those of the steps of `program`.
    """
    seconds = [*costs.seconds]
    for s, step in enumerate(program.steps if spreading else ()):
        made = (v for i in step.equations for v in eqns[i].outvars)
        seconds[s] *= max((spreading.get(v, 1) for v in made), default=1)
    return dataclasses.replace(costs, seconds=tuple(seconds))


class _Rule:
    """What stands in place of each equation.

    Args:
      found: results of transposed convolutions, to which it adds.
    """

    def __init__(self, found: dict[Var, int]) -> None:
        self.found = found
        self.flipped: set[Atom] = set()

    def __call__(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        if eqn.primitive.name == "rev":
            self.flipped.update(eqn.outvars)
        if not _spreads(eqn):
            return [eqn]
        kernel = eqn.invars[1]
        is_flipped = not isinstance(kernel, Literal) and kernel in self.flipped
        made = [eqn] if is_flipped else _known(eqn)
        if len(made) > 1:
            times = math.prod(eqn.params["lhs_dilation"])
            self.found.update((v, times) for each in made for v in each.outvars if _is_conv(each))
        return made


def _is_conv(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "conv_general_dilated"


def _spreads(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a convolution of one group that spreads its input, and does nothing else."""
    if not _is_conv(eqn):
        return False
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    still = *params["window_strides"], params["feature_group_count"], params["batch_group_count"]
    taps = math.prod(shape_of(eqn.invars[1])[d] for d in numbers.rhs_spec[2:])
    spread = any(n != 1 for n in params["lhs_dilation"])
    return spread and taps > 1 and {*still} == {1} and {*params["rhs_dilation"]} == {1}


def _known(eqn: JaxprEqn) -> list[JaxprEqn]:
    of_kernel = sums_samples(eqn.params["dimension_numbers"])
    return _of_kernel(eqn) if of_kernel else _flipped(eqn)


def _flipped(eqn: JaxprEqn) -> list[JaxprEqn]:
    """`eqn` with its kernel flipped twice, of which XLA sees the second time alone."""
    flip = functools.partial(lax.rev, dimensions=eqn.params["dimension_numbers"].rhs_spec[2:])
    twice = lambda kernel: flip(lax.optimization_barrier(flip(kernel)))
    flips, kernel = spliced(twice, [eqn.invars[1]], eqn)
    return [*flips, eqn.replace(invars=[eqn.invars[0], kernel])]


def _of_kernel(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The gradient `eqn` to a kernel, with its operands exchanged: their sums are the same ones, in
    places that run backwards. It alone, if more than all would be cut off."""
    [lhs, rhs], [out] = eqn.invars, eqn.outvars
    params: dict[str, Any] = eqn.params
    numbers = params["dimension_numbers"]
    sizes = lambda a, spec: [shape_of(a)[d] for d in spec[2:]]
    places = sizes(out, numbers.out_spec)
    padding = []
    for (low, _), size, by, window, n in zip(
        params["padding"],
        sizes(lhs, numbers.lhs_spec),
        params["lhs_dilation"],
        sizes(rhs, numbers.rhs_spec),
        places,
        strict=True,
    ):
        before = n - 1 - low
        padding.append((before, n + (size - 1) * by - window - before))
    if min(map(min, padding)) < 0:
        return [eqn]
    rows, columns, *space = numbers.out_spec
    specs = numbers.rhs_spec, numbers.lhs_spec, (columns, rows, *space)
    precision = params["precision"]
    exchanged = {
        "dimension_numbers": lax.ConvDimensionNumbers(*specs),
        "lhs_dilation": params["rhs_dilation"],
        "rhs_dilation": params["lhs_dilation"],
        "padding": tuple(padding),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    backwards = compat.new_var(out.aval)
    made = eqn.replace(invars=[rhs, lhs], outvars=[backwards], params={**params, **exchanged})
    flip = functools.partial(lax.rev, dimensions=space)
    return [made, *spliced(flip, [backwards], eqn, out)[0]]
