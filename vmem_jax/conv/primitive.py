"""The micro-batched convolution as a JAX primitive, and its lowering for CPUs.

It is bilinear, and its derivatives are the other two passes of the same layer, so three rules make it
differentiable any number of times. On a CPU it is lowered to slices of XLA's own convolution, on an
NVIDIA GPU to a custom call, where its engines are cuDNN's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jexc
from jax.interpreters import ad, batching

from vmem_jax.conv.call import lower
from vmem_jax.conv.pick import choose
from vmem_jax.conv.slices import in_slices, layouts, roles
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

    Forward takes x and w and returns y; backward data takes the gradient to y, and w, and returns
    that to x; backward filter takes x, and the gradient to y, and returns that to w. Channels last,
    x is (N, *size, C), w (K, *kernel, C / groups) and y (N, *out, K), else (N, C, *size) and so on.
    All are of `convolution.dtype`; gradients to w are summed over micro-batches in float32 at least.

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


# -- what JAX has to know


@micro_convolution_p.def_abstract_eval
def _abstract(
    lhs: Any, rhs: Any, *, convolution: Convolution, configuration: Configuration, limit: int | None
) -> Any:
    return jax.core.ShapedArray(layouts(convolution)[roles(convolution.which)[2]], lhs.dtype)


_PASS_TO = {"y": Pass.FORWARD, "x": Pass.BACKWARD_DATA, "w": Pass.BACKWARD_FILTER}


def _transposed(operand: int) -> Callable[..., jax.Array]:
    """The rule for the cotangent of an operand: the pass that has that operand for its result."""

    def rule(
        ct: jax.Array,
        lhs: Any,
        rhs: Any,
        *,
        convolution: Convolution,
        configuration: Configuration,
        limit: int | None,
    ) -> jax.Array:
        names = roles(convolution.which)
        known = {names[1 - operand]: rhs if operand == 0 else lhs, names[2]: ct}
        other = dataclasses.replace(convolution, which=_PASS_TO[names[operand]])
        first, second, _ = roles(other.which)
        return micro_convolution(other, choose(other, limit), known[first], known[second], limit)

    return rule


ad.defbilinear(micro_convolution_p, _transposed(0), _transposed(1))


def _batched(
    args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[jax.Array, int]:
    """vmap: one after the other. Inside a model samples are a dimension of the convolution's own."""
    moved = [None if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]

    def one(mapped: list[jax.Array]) -> jax.Array:
        each = iter(mapped)
        operands = [a if m is None else next(each) for a, m in zip(args, moved, strict=True)]
        return micro_convolution_p.bind(*operands, **params)

    return lax.map(one, [m for m in moved if m is not None]), 0


batching.primitive_batchers[micro_convolution_p] = _batched


lower(micro_convolution_p, in_slices)
