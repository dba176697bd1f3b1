"""conv_general_dilated: `lax.conv_general_dilated` within a limit of workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.convolutions import DTYPES, match
from vmem_jax.conv.pick import choose
from vmem_jax.conv.primitive import micro_convolution
from vmem_jax.errors import parse_size


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    workspace_limit: int | str,
) -> jax.Array:
    """`jax.lax.conv_general_dilated`, forward and backward, within `workspace_limit`.

    The batch runs in micro-batches where the limit requires it, chosen for each pass of the layer by
    µ-cuDNN's dynamic program for one kernel (WR; Oyama et al., CLUSTER 2018, section III-B).
    Arguments and results are those of `jax.lax.conv_general_dilated`, up to the order in which
    gradients to the kernel are summed. For Flax:

        limited = functools.partial(vmem_jax.conv_general_dilated, workspace_limit="64MiB")
        nnx.Conv(..., conv_general_dilated=limited)

    Inside `vmem_jax.jit` it is not needed, since the plan chooses workspaces.

    Args:
      workspace_limit: bytes, or a size such as "64MiB", that each kernel may use beside its operands
        and its result.

    Raises:
      WorkspaceError: not even one sample at a time is within the limit.
      ValueError: the limit is not a size; or the convolution cannot run in micro-batches: integers,
        mixed dtypes, negative padding, more than three spatial dimensions, no elements, or groups of
        the batch.
    """
    limit = parse_size(workspace_limit, "workspace_limit")

    def stock(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
            precision,
            preferred_element_type,
            out_sharding,
        )

    [eqn] = compat.open_jaxpr(jax.make_jaxpr(stock)(lhs, rhs)).eqns
    matched = match(eqn, {})
    if matched is None:
        shapes = " and ".join(f"{v.aval.dtype.name}{list(v.aval.shape)}" for v in eqn.invars)
        raise ValueError(
            f"the convolution of {shapes} cannot run in micro-batches: it takes one dtype of "
            f"{', '.join(DTYPES)}, one to three spatial dimensions, padding that is not negative and "
            "batch_group_count 1. Use jax.lax.conv_general_dilated, which has no workspace_limit."
        )
    configuration = choose(matched.convolution, limit)
    operands = matched.operands(lhs, rhs)
    return matched.result(micro_convolution(matched.convolution, configuration, *operands, limit))
