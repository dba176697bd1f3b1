"""slices: a pass of a convolution by XLA's own convolutions, micro-batch after micro-batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from vmem_jax.core.convolution import Configuration, Convolution, Epilogue, Pass


def roles(which: Pass) -> tuple[str, str, str]:
    """Two operands and the result of a pass: "x", "w" and "y", or gradients of their shapes."""
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


def with_epilogue(convolution: Convolution, y: jax.Array, bias: jax.Array) -> jax.Array:
    """`y` of a forward pass after the epilogue of `convolution`, which it has; `bias` is (K,)."""
    spread = () if convolution.channels_last else (1,) * len(convolution.size)
    y = y + bias.reshape(-1, *spread)
    return jnp.maximum(y, 0) if convolution.epilogue == Epilogue.BIAS_RELU else y


def with_prologue(
    convolution: Convolution, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
    """`x` after the prologue of `convolution`, which it has; `scale` and `bias` are (C,)."""
    spread = () if convolution.channels_last else (1,) * len(convolution.size)
    wide = lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32))
    scale, bias = (wide(vector).reshape(-1, *spread) for vector in (scale, bias))
    return jnp.maximum(wide(x) * scale + bias, 0).astype(x.dtype)


def sums_of(convolution: Convolution, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of `y` and of its squares, each (K,) in float32: what `Epilogue.SUMS` gives."""
    axes = tuple(range(y.ndim - 1)) if convolution.channels_last else (0, *range(2, y.ndim))
    y = y.astype(jnp.float32)
    return y.sum(axes), jnp.square(y).sum(axes)


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
        if first:
            out, lhs, rhs = lax.optimization_barrier((out, lhs, rhs))
        part = convolution.with_batch(micro.batch)
        take = lambda a, start=first, size=micro.batch: lax.slice_in_dim(a, start, start + size)
        if sums:
            part = dataclasses.replace(part, dtype=dtype.name)
            out = out + whole(part, take(lhs).astype(dtype), take(rhs).astype(dtype))
        else:
            out = lax.dynamic_update_slice_in_dim(out, whole(part, take(lhs), rhs), first, 0)
        first += micro.batch
    return out.astype(lhs.dtype)
