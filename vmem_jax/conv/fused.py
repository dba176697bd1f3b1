"""fused: a forward pass in micro-batches with what follows it, as a JAX primitive.

It stands in steps that are differentiated already, so it has no derivatives. Where cuDNN does not run
it, the parts run one after the other.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core as jexc

from vmem_jax.conv.call import lower
from vmem_jax.conv.slices import in_slices, layouts, with_epilogue
from vmem_jax.core.convolution import Configuration, Convolution

fused_convolution_p = jexc.Primitive("fused_convolution")


def fused_convolution(
    convolution: Convolution,
    configuration: Configuration,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    """y of a forward pass, micro-batch after micro-batch, and the epilogue of `convolution`.

    Args:
      x, w: as those of `micro_convolution`.
      bias: (K,), of the same dtype.

    Raises:
      ValueError: there is no epilogue, or the operands are not those of `convolution`.
    """
    shapes = layouts(convolution)
    wanted = [shapes["x"], shapes["w"], (convolution.features_out,)]
    got = [operand.shape for operand in (x, w, bias)]
    if not convolution.epilogue or got != wanted:
        raise ValueError(f"operands of {convolution} are of shapes {wanted}, not {got}.")
    if configuration.batch != convolution.batch:
        raise ValueError(
            f"the micro-batches have {configuration.batch} samples, the batch {convolution.batch}."
        )
    return fused_convolution_p.bind(
        x, w, bias, convolution=convolution, configuration=configuration
    )


@fused_convolution_p.def_abstract_eval
def _abstract(x: Any, *_: Any, convolution: Convolution, configuration: Configuration) -> Any:
    return jax.core.ShapedArray(layouts(convolution)["y"], x.dtype)


def _in_parts(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array,
    *,
    convolution: Convolution,
    configuration: Configuration,
) -> jax.Array:
    y = in_slices(x, w, convolution=convolution, configuration=configuration)
    return with_epilogue(convolution, y, bias)


lower(fused_convolution_p, _in_parts)
