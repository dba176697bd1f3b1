"""What JAX itself has for moving activations, so that others can be compared with it."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

_NAME = "layer_input"


def with_stock_offload(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`loss` of parameters, whose layers leave their inputs in pinned host memory.

    The input of every convolution and fully connected layer is moved, and all else that the backward
    pass reads is computed again from these: `jax.checkpoint` with
    `save_and_offload_only_these_names`.
    """
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def named(params: Any) -> Any:
        with nn.intercept_methods(_name_input):
            return loss(params)

    return jax.checkpoint(named, policy=policy)


def _name_input(
    method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], context: Any
) -> Any:
    if isinstance(context.module, (nn.Conv, nn.Dense)) and context.method_name == "__call__":
        args = (checkpoint_name(args[0], _NAME), *args[1:])
    return method(*args, **kwargs)
