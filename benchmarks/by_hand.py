"""What a user may pick by hand for the layers of a network: the policies of `jax.checkpoint`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

Wrap = Callable[[Callable], Callable]

_POLICIES = jax.checkpoint_policies


def _is_product(prim: Any, *_: Any, **__: Any) -> bool:
    """`dots_saveable`, of convolutions as well."""
    return prim.name in ("dot_general", "conv_general_dilated")


def _offloaded(*names: str) -> Any:
    return _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


POLICIES: dict[str, Any] = {
    "plain": _POLICIES.everything_saveable,
    "checkpoint": None,
    "dots": _POLICIES.dots_with_no_batch_dims_saveable,
    "every_dot": _is_product,
    "names": _POLICIES.save_only_these_names("attention", "hidden"),
    "offload": _offloaded("attention", "hidden"),
}
"""What a user may pick for each layer, as `jax.checkpoint` takes it; "checkpoint" keeps nothing, and
"plain" is without `jax.checkpoint`."""

SEGMENTS = "sqrt"
"""What a user may pick for scanned layers: nothing is kept of a layer or a segment of √n layers."""


def wrapping(name: str) -> Wrap:
    """What is applied to a layer: `jax.checkpoint` with a policy of `POLICIES`, or nothing."""
    if name == "plain":
        return lambda layer: layer
    return lambda layer: jax.checkpoint(layer, policy=POLICIES[name])


def layers_by_hand(name: str, scanned: bool = True) -> dict[str, Callable]:
    """What networks with layers in a scan take where `name` was picked: `wrap`, which is applied to a
    layer, and `scan`, which runs the layers as `jax.lax.scan` does.

    Raises:
      ValueError: `SEGMENTS` are of scanned layers.
    """
    if name != SEGMENTS:
        return {"wrap": wrapping(name), "scan": jax.lax.scan}
    if not scanned:
        raise ValueError(f"{SEGMENTS!r} needs layers in a scan, and these are unrolled.")
    return {"wrap": wrapping("checkpoint"), "scan": in_segments}


def in_segments(once: Callable, carry: Any, xs: Any) -> tuple[Any, None]:
    """`jax.lax.scan` without results, in a loop over segments of at most √n iterations, which are
    computed again in the backward pass.

    Chen et al., "Training deep nets with sublinear memory cost", 2016, section 4.
    """
    length = len(jax.tree.leaves(xs)[0])
    size = max(n for n in range(1, math.isqrt(length) + 1) if length % n == 0)
    segments = jax.tree.map(lambda x: x.reshape(length // size, size, *x.shape[1:]), xs)
    segment = jax.checkpoint(lambda carry, xs: jax.lax.scan(once, carry, xs))
    return jax.lax.scan(segment, carry, segments)
