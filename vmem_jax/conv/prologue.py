"""prologue: a convolution that normalises its operand and adds up its result, as a JAX primitive.

Batch norm and ReLU before a convolution are, once its statistics are known, ReLU(x · scale + bias)
with one value of each a channel; its statistics are sums of the result of the convolution before. A
forward pass of cuDNN does both as it loads and stores, and a gradient to w the first. So the
normalised x is never in memory.

cuDNN has engines for it in float16 alone, with scale and bias in float16; they compute the prologue
in float32 and round it, as tensor cores take it. By the graph sums are those of y as it is stored. It
stands in steps that are differentiated already, so it has no derivatives. Where cuDNN does not run
it, the parts run one after the other.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core as jexc

from vmem_jax.conv.call import all_by_cudnn, lower
from vmem_jax.conv.slices import in_slices, layouts, roles, sums_of, with_prologue
from vmem_jax.core.convolution import Configuration, Convolution, Epilogue

normalising_convolution_p = jexc.Primitive("normalising_convolution")
normalising_convolution_p.multiple_results = True


def normalising_convolution(
    convolution: Convolution,
    configuration: Configuration,
    x: jax.Array,
    other: jax.Array,
    *vectors: jax.Array,
) -> list[jax.Array]:
    """The result of a pass of a convolution with a prologue, or with the sums of its result.

    Args:
      x, other: w of a forward pass, the gradient to y of one to w, as those of `micro_convolution`.
      vectors: scale and bias, (C,) each, of the same dtype; none without a prologue.

    Returns:
      The result; with `Epilogue.SUMS` then sums of it and of its squares, (K,) each in float32.

    Raises:
      ValueError: there is neither a prologue nor are there sums, or the operands are not those of
        `convolution`.
    """
    c = convolution
    shapes = layouts(c)
    first, second, _ = roles(c.which)
    wanted = [shapes[first], shapes[second], *[(c.features_in,)] * (2 * c.prologue)]
    got = [operand.shape for operand in (x, other, *vectors)]
    carries = c.prologue or c.epilogue == Epilogue.SUMS
    if not carries or c.epilogue not in (Epilogue.NONE, Epilogue.SUMS) or got != wanted:
        raise ValueError(f"operands of {c} are of shapes {wanted}, not {got}.")
    if configuration.batch != c.batch:
        raise ValueError(
            f"the micro-batches have {configuration.batch} samples, the batch {c.batch}."
        )
    return normalising_convolution_p.bind(
        x, other, *vectors, convolution=convolution, configuration=configuration
    )


@normalising_convolution_p.def_abstract_eval
def _abstract(x: Any, *_: Any, convolution: Convolution, configuration: Configuration) -> list[Any]:
    del configuration
    result = layouts(convolution)[roles(convolution.which)[2]]
    sums = 2 * (convolution.epilogue == Epilogue.SUMS)
    vector = jax.core.ShapedArray((convolution.features_out,), "float32")
    return [jax.core.ShapedArray(result, x.dtype), *[vector] * sums]


def _in_parts(
    x: jax.Array,
    other: jax.Array,
    *vectors: jax.Array,
    convolution: Convolution,
    configuration: Configuration,
) -> list[jax.Array]:
    if convolution.prologue:
        x = with_prologue(convolution, x, *vectors)
    result = in_slices(x, other, convolution=convolution, configuration=configuration)
    sums = sums_of(convolution, result) if convolution.epilogue == Epilogue.SUMS else ()
    return [result, *sums]


lower(normalising_convolution_p, _in_parts, all_by_cudnn)
