"""convolutions: matches `conv_general_dilated` equations to the layer and pass that they compute.

After differentiation all three passes are `conv_general_dilated`, and only parameters distinguish
them: the gradient to x convolves the dilated gradient with a flipped kernel, and the gradient to w
exchanges samples and channels. cuDNN has a kernel for each pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from vmem_jax.capture.primitives import is_strict
from vmem_jax.core.convolution import Convolution, Epilogue, Pass
from vmem_jax.jax_compat import Atom, JaxprEqn, Literal, Var

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Matched:
    """An equation `conv_general_dilated` as the pass of a layer.

    Attributes:
      convolution: of that layer.
      numbers: of the equation, which operand axes are what.
    """

    convolution: Convolution
    numbers: lax.ConvDimensionNumbers

    def operands(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The operands of the equation as those of the pass, in the layout of `convolution`.

        Forward: x and w. Backward data: the gradient to y, and w. Backward filter: x, and the
        gradient to y.
        """
        c, numbers = self.convolution, self.numbers
        lhs = lhs.transpose(numbers.lhs_spec)
        if c.which == Pass.BACKWARD_FILTER:
            rhs = rhs.transpose(numbers.rhs_spec)
            lhs, rhs = lhs.swapaxes(0, 1), rhs.swapaxes(0, 1)  # samples first
            return _laid_out(lhs, c), _laid_out(rhs, c)
        return _laid_out(lhs, c), self.kernel(rhs)

    def kernel(self, rhs: jax.Array) -> jax.Array:
        """The second operand of the equation, where that is the kernel, in the layout of
        `convolution`."""
        c = self.convolution
        rhs = rhs.transpose(self.numbers.rhs_spec)
        if c.which == Pass.BACKWARD_DATA:
            # the layer's kernel; XLA cancels this against the flip before it, where there is one
            rhs = lax.rev(rhs, range(2, rhs.ndim))
            rhs = _exchange(rhs, c.groups)
        return _laid_out(rhs, c)

    def result(self, result: jax.Array) -> jax.Array:
        """The result of the pass as the equation has it."""
        c, numbers = self.convolution, self.numbers
        if c.channels_last:
            result = result.transpose(0, result.ndim - 1, *range(1, result.ndim - 1))
        if c.which == Pass.BACKWARD_FILTER:
            result = result.swapaxes(0, 1)  # the equation has x's channels where samples stand
        order = numbers.out_spec
        return result.transpose([order.index(d) for d in range(len(order))])


@dataclasses.dataclass(frozen=True)
class Behind:
    """What a kernel does after its convolution, where cuDNN can do it in one.

    Attributes:
      epilogue: what it is.
      equations: indices of the convolution and of what makes up its epilogue, in order.
      bias: the K values that are added.
    """

    epilogue: Epilogue
    equations: tuple[int, ...]
    bias: Atom


def match_epilogue(
    matched: Matched,
    kernel: Sequence[int],
    root: int,
    eqns: Sequence[JaxprEqn],
    maker: Mapping[Var, JaxprEqn],
) -> Behind | None:
    """What equations `kernel` do after their convolution `root`, if it is what cuDNN can do, and all.

    Args:
      kernel: indices into `eqns`, in order.
      maker: for each variable the equation that makes it.
    """
    if matched.convolution.which != Pass.FORWARD:
        return None
    out = eqns[root].outvars[0]
    found: Behind | None = None
    for i in kernel:
        eqn = eqns[i]
        if i <= root or not any(atom is out for atom in eqn.invars):
            continue
        others = [atom for atom in eqn.invars if atom is not out]
        name, out = eqn.primitive.name, eqn.outvars[0]
        if found is None and name in ("add", "add_any") and others:
            axis, features = matched.numbers.out_spec[1], matched.convolution.features_out
            bias = _bias_of(others[0], axis, features, maker)
            if bias is None:
                return None
            found = Behind(Epilogue.BIAS, (root, i), bias)
        elif found is not None and found.epilogue == Epilogue.BIAS and _is_relu(name, others):
            found = Behind(Epilogue.BIAS_RELU, (*found.equations, i), found.bias)
        else:
            return None
    return found


def _is_relu(name: str, others: Sequence[Atom]) -> bool:
    [zero] = others or [None]
    return name == "max" and isinstance(zero, Literal) and not np.any(zero.val)


def _bias_of(atom: Atom, axis: int, features: int, maker: Mapping[Var, JaxprEqn]) -> Atom | None:
    """The values, one for each of `features`, that are spread along every axis but `axis`."""
    while math.prod(atom.aval.shape) != features:
        eqn = None if isinstance(atom, Literal) else maker.get(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return None
        spread = eqn.params["broadcast_dimensions"]
        if axis not in spread:
            return None
        axis, atom = spread.index(axis), eqn.invars[0]
        if atom.aval.shape[axis] != features:
            return None
    return atom if atom.aval.shape[axis : axis + 1] == (features,) else None


def match(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> Matched | None:
    """The pass that `eqn` is, or None where cuDNN has none for it, so that it stays XLA's.

    Args:
      maker: for each variable the equation that makes it; a kernel may be flipped by one.
    """
    if eqn.primitive.name != "conv_general_dilated":
        return None
    lhs, rhs = (v.aval for v in eqn.invars)
    dtype = lhs.dtype.name
    if dtype not in DTYPES or {rhs.dtype.name, eqn.outvars[0].aval.dtype.name} != {dtype}:
        return None
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    if not 1 <= lhs.ndim - 2 <= 3 or 0 in lhs.shape or 0 in rhs.shape:
        return None
    facts = _Equation(
        lhs=tuple(lhs.shape[d] for d in numbers.lhs_spec),
        rhs=tuple(rhs.shape[d] for d in numbers.rhs_spec),
        out=tuple(eqn.outvars[0].aval.shape[d] for d in numbers.out_spec),
        strides=tuple(params["window_strides"]),
        padding=tuple(tuple(p) for p in params["padding"]),
        lhs_dilation=tuple(params["lhs_dilation"]),
        rhs_dilation=tuple(params["rhs_dilation"]),
        groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
    )
    kernel = eqn.invars[1]
    made_by = None if isinstance(kernel, Literal) else maker.get(kernel)
    flipped = made_by is not None and made_by.primitive.name == "rev"
    if sums_samples(numbers):
        which, channels = Pass.BACKWARD_FILTER, numbers.lhs_spec[0]
    else:
        dilated = any(d != 1 for d in facts.lhs_dilation)
        flips = flipped and all(s == 1 for s in facts.strides)  # else it is a transposed layer's
        which = Pass.BACKWARD_DATA if dilated or flips else Pass.FORWARD
        channels = numbers.lhs_spec[1]
    found = {Pass.FORWARD: _forward, Pass.BACKWARD_DATA: _data, Pass.BACKWARD_FILTER: _filter}[
        which
    ](facts)
    if found is None:
        return None
    convolution = Convolution(
        which=which,
        dtype=dtype,
        strict=is_strict(eqn),
        channels_last=channels == lhs.ndim - 1,
        **found,
    )
    fits = all(low >= 0 and high >= 0 for low, high in convolution.padding)
    if not fits or convolution.out != found_out(facts, which):
        return None
    return Matched(convolution, numbers)


def sums_samples(numbers: lax.ConvDimensionNumbers) -> bool:
    """Whether samples, which come first in memory, are the "channels" of a convolution: it is the
    gradient to a kernel."""
    return bool(numbers.lhs_spec[1] == 0)


@dataclasses.dataclass(frozen=True)
class _Equation:
    """The parameters of an equation; shapes as (batch, features, space) and (out, in, space)."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    groups: int
    batch_groups: int


def found_out(e: _Equation, which: Pass) -> tuple[int, ...]:
    """Spatial extents of the layer's y, as the equation has them."""
    return {Pass.FORWARD: e.out, Pass.BACKWARD_DATA: e.lhs, Pass.BACKWARD_FILTER: e.rhs}[which][2:]


def _forward(e: _Equation) -> dict[str, Any] | None:
    if e.batch_groups != 1:
        return None
    return {
        "batch": e.lhs[0],
        "features_in": e.lhs[1],
        "features_out": e.rhs[0],
        "size": e.lhs[2:],
        "kernel": e.rhs[2:],
        "strides": e.strides,
        "padding": e.padding,
        "dilation": e.rhs_dilation,
        "groups": e.groups,
    }


def _data(e: _Equation) -> dict[str, Any] | None:
    """Here lhs is the gradient to y, dilated by the layer's strides, and out that to x."""
    if e.batch_groups != 1 or any(s != 1 for s in e.strides):
        return None
    taps = [d * (k - 1) for d, k in zip(e.rhs_dilation, e.rhs[2:], strict=True)]
    before = [tap - low for tap, (low, _) in zip(taps, e.padding, strict=True)]
    return {
        "batch": e.lhs[0],
        "features_in": e.out[1],
        "features_out": e.lhs[1],
        "size": e.out[2:],
        "kernel": e.rhs[2:],
        "strides": e.lhs_dilation,
        "padding": _padding(e.out[2:], e.lhs[2:], taps, e.lhs_dilation, before),
        "dilation": e.rhs_dilation,
        "groups": e.groups,
    }


def _filter(e: _Equation) -> dict[str, Any] | None:
    """Here lhs is x and rhs the gradient to y, both with samples as channels, and out that to w."""
    if e.groups != 1 or any(d != 1 for d in e.lhs_dilation):
        return None
    taps = [d * (k - 1) for d, k in zip(e.strides, e.out[2:], strict=True)]
    before = [low for low, _ in e.padding]
    return {
        "batch": e.lhs[1],
        "features_in": e.lhs[0],
        "features_out": e.rhs[0],
        "size": e.lhs[2:],
        "kernel": e.out[2:],
        "strides": e.rhs_dilation,
        "padding": _padding(e.lhs[2:], e.rhs[2:], taps, e.rhs_dilation, before),
        "dilation": e.strides,
        "groups": e.batch_groups,
    }


def _padding(
    size: tuple[int, ...],
    out: tuple[int, ...],
    taps: list[int],
    strides: tuple[int, ...],
    before: list[int],
) -> tuple[tuple[int, int], ...]:
    """The layer's padding. What comes after leaves a choice where strides leave a remainder: as much
    as before, if that is one, since library kernels know symmetric padding best."""
    found = []
    for x, y, tap, stride, low in zip(size, out, taps, strides, before, strict=True):
        least = (y - 1) * stride + tap + 1 - x - low
        found.append((low, min(max(low, least), max(least + stride - 1, 0))))
    return tuple(found)


def _exchange(kernel: jax.Array, groups: int) -> jax.Array:
    """A kernel (C, K of a group, space) as (K, C of a group, space), and the reverse."""
    rest = kernel.shape[2:]
    split = kernel.reshape(groups, kernel.shape[0] // groups, kernel.shape[1], *rest)
    return split.swapaxes(1, 2).reshape(-1, kernel.shape[0] // groups, *rest)


def _laid_out(value: jax.Array, convolution: Convolution) -> jax.Array:
    """(N, C, space) in the layout of `convolution`."""
    if not convolution.channels_last:
        return value
    return value.transpose(0, *range(2, value.ndim), 1)
