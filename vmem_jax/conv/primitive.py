"""The micro-batched convolution as a JAX primitive, and its lowering for CPUs.

It is bilinear, and its derivatives are the other two passes of the same layer, so three rules make it
differentiable any number of times. On a CPU, and for configurations of XLA's own, it is lowered to
slices of XLA's convolution; `conv/cuda.py` lowers it to the custom call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jexc
from jax.interpreters import ad, batching, mlir

from vmem_jax.conv.choice import choose
from vmem_jax.core.convolution import Configuration, Convolution, Pass

micro_convolution_p = jexc.Primitive("micro_convolution")


def micro_convolution(
    convolution: Convolution,
    configuration: Configuration,
    lhs: jax.Array,
    rhs: jax.Array,
    limit: int | None = None,
) -> jax.Array:
    """One pass of a convolution, micro-batch after micro-batch.

    Forward takes x and w and returns y; backward data takes the gradient to y, and w, and returns that
    to x; backward filter takes x, and the gradient to y, and returns that to w. With channels last x
    is (N, *size, C), w (K, *kernel, C / groups) and y (N, *out, K), else (N, C, *size) and so on. All
    are of `convolution.dtype`; gradients to w are summed over micro-batches in float32 at least.

    Args:
      limit: bytes of workspace within which the passes of its derivatives choose.

    Raises:
      ValueError: shapes or dtypes are not those of `convolution`, or the micro-batches do not add up.
    """
    shapes = layouts(convolution)
    first, second, _ = roles(convolution.which)
    for value, role in ((lhs, first), (rhs, second)):
        if value.shape != shapes[role] or value.dtype.name != convolution.dtype:
            raise ValueError(
                f"{role} of this {convolution.which} convolution is {convolution.dtype} "
                f"{shapes[role]}, not {value.dtype.name} {value.shape}."
            )
    if configuration.batch != convolution.batch:
        raise ValueError(
            f"the micro-batches have {configuration.batch} samples, the batch {convolution.batch}."
        )
    return micro_convolution_p.bind(
        lhs, rhs, convolution=convolution, configuration=configuration, limit=limit
    )


def roles(which: Pass) -> tuple[str, str, str]:
    """Two operands and the result of a pass, of "x", "w" and "y" (their gradients have the shapes)."""
    return {
        Pass.FORWARD: ("x", "w", "y"),
        Pass.BACKWARD_DATA: ("y", "w", "x"),
        Pass.BACKWARD_FILTER: ("x", "y", "w"),
    }[which]


def layouts(convolution: Convolution) -> dict[str, tuple[int, ...]]:
    """The shapes of x, w and y in the layout of `convolution`."""
    c = convolution
    found = {"x": c.x_shape, "w": c.w_shape, "y": c.y_shape}
    if c.channels_last:
        found = {role: (s[0], *s[2:], s[1]) for role, s in found.items()}
    return found


# -- what JAX has to know


@micro_convolution_p.def_abstract_eval
def _abstract(lhs, rhs, *, convolution, configuration, limit):
    return jax.core.ShapedArray(layouts(convolution)[roles(convolution.which)[2]], lhs.dtype)


def _pass(which: Pass, like: Convolution, limit: int | None, lhs, rhs):
    """Another pass of the same layer."""
    convolution = dataclasses.replace(like, which=which)
    return micro_convolution(convolution, choose(convolution, limit), lhs, rhs, limit)


_PASS_TO = {"y": Pass.FORWARD, "x": Pass.BACKWARD_DATA, "w": Pass.BACKWARD_FILTER}


def _transposed(operand: int) -> Callable:
    """The rule for the cotangent of an operand: the pass that has that operand for its result."""

    def rule(ct, lhs, rhs, *, convolution, configuration, limit):
        names = roles(convolution.which)
        known = {names[1 - operand]: rhs if operand == 0 else lhs, names[2]: ct}
        which = _PASS_TO[names[operand]]
        first, second, _ = roles(which)
        return _pass(which, convolution, limit, known[first], known[second])

    return rule


ad.defbilinear(micro_convolution_p, _transposed(0), _transposed(1))


def _batched(args, dims, *, convolution, configuration, limit):
    """vmap: one after the other. Inside a model samples are a dimension of the convolution's own."""
    call = functools.partial(
        micro_convolution_p.bind, convolution=convolution, configuration=configuration, limit=limit
    )
    moved = [
        None if d is batching.not_mapped else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, dims, strict=True)
    ]
    mapped = [m for m in moved if m is not None]

    def one(values):
        values = iter(values)
        return call(*(a if m is None else next(values) for a, m in zip(args, moved, strict=True)))

    return lax.map(one, mapped), 0


batching.primitive_batchers[micro_convolution_p] = _batched


# -- on XLA's own convolutions


def whole(convolution: Convolution, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The pass of `convolution` by XLA, undivided. Operands as those of `micro_convolution`."""
    shapes = layouts(convolution)
    spec = tuple(range(len(shapes["x"])))
    if convolution.channels_last:
        spec = (0, spec[-1], *spec[1:-1])
    precision = lax.Precision.HIGHEST if convolution.strict else None

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            w,
            convolution.strides,
            convolution.padding,
            rhs_dilation=convolution.dilation,
            dimension_numbers=lax.ConvDimensionNumbers(spec, spec, spec),
            feature_group_count=convolution.groups,
            precision=precision,
        )

    of = lambda role: jax.ShapeDtypeStruct(shapes[role], lhs.dtype)
    if convolution.which == Pass.FORWARD:
        return forward(lhs, rhs)
    if convolution.which == Pass.BACKWARD_DATA:
        [dx] = jax.linear_transpose(lambda x: forward(x, rhs), of("x"))(lhs)
        return dx
    [dw] = jax.linear_transpose(lambda w: forward(lhs, w), of("w"))(rhs)
    return dw


def in_slices(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    convolution: Convolution,
    configuration: Configuration,
    limit: int | None = None,
) -> jax.Array:
    """The micro-batches of `configuration` by XLA's own convolutions, one after the other.

    A barrier ties each to the result so far, else XLA would run them side by side, with a workspace
    for each.
    """
    if len(configuration.micros) == 1:
        return whole(convolution, lhs, rhs)
    sums = convolution.which == Pass.BACKWARD_FILTER
    dtype = jnp.promote_types(lhs.dtype, jnp.float32) if sums else lhs.dtype
    out = jnp.zeros(layouts(convolution)[roles(convolution.which)[2]], dtype)
    first = 0
    for micro in configuration.micros:
        part = convolution.with_batch(micro.batch)
        take = lambda a, start=first, size=micro.batch: lax.slice_in_dim(a, start, start + size)
        if sums:
            part = dataclasses.replace(part, dtype=dtype.name)
            out = out + whole(part, take(lhs).astype(dtype), take(rhs).astype(dtype))
        else:
            out = lax.dynamic_update_slice_in_dim(out, whole(part, take(lhs), rhs), first, 0)
        first += micro.batch
        out, lhs, rhs = lax.optimization_barrier((out, lhs, rhs))
    return out.astype(lhs.dtype)


micro_convolution_p.def_impl(
    lambda lhs, rhs, **params: jax.jit(functools.partial(micro_convolution_p.bind, **params))(
        lhs, rhs
    )
)
mlir.register_lowering(micro_convolution_p, mlir.lower_fun(in_slices, multiple_results=False))
