"""Whether what a traced step leaves to its backward pass can wait compressed, and what of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.core.compression import compressed_nbytes
from vmem_jax.entry import Traced
from vmem_jax.profile.density import densities
from vmem_jax.prove.device import devices_of
from vmem_jax.rewrite.compression import compressed, compressible, rectified
from vmem_jax.transfer import compression, ffi

_MARGIN = 1 / 32
"""Of the values that are expected: for so many more there is room. What finds none overflows."""

_WORTH = 0.9
"""Of its bytes: what takes more than this share of them when compressed stays as it is."""

_LEAST = 1 / 500
"""Of all temporaries: smaller values are not worth two kernels."""


def check_compression(
    name: str,
    traced: Traced,
    leaves: Sequence[Any],
    density: float | None,
    target: str | None,
    inlined: bool,
) -> None:
    """Raises ValueError if `traced`, a step called `name`, cannot compress, or how much is not known.

    Args:
      leaves: the arguments, or their shapes.
      density: as in `ways_to_compress`.
      target: a card that is not there, by name.
      inlined: the step is called inside another jit.
    """
    devices, mesh = devices_of(traced.avals), traced.captured.shards.mesh
    platform = "gpu" if target is not None else devices[0].platform
    why = ffi.unusable(platform, devices, mesh, inlined) or compression.unusable(platform)
    if len(devices) > 1:
        why = f"it runs on {len(devices)} devices"
    elif density is None and not (leaves and all(map(compat.is_array, leaves))):
        why = "its arguments are shapes alone, which tell no zeros: call it, or give `density`"
    elif density is None and traced.hosted:
        why = "some of its arguments are in host memory: give `density`"
    if not why and target is None:
        why = compression.cannot_overflow(devices[0])
    if why:
        raise ValueError(f"`{name}` cannot compress: {why}.")


def ways_to_compress(
    traced: Traced, leaves: Sequence[Any], density: float | None, limit: int | None
) -> tuple[dict[int, int], str]:
    """Buffers of `traced` and how many bytes each takes when compressed; and why there are none.

    Args:
      leaves: the arguments.
      density: of what ReLUs and masks leave, from 0 to 1; None to count the zeros of every residual
        on `leaves`.
      limit: bytes of device memory that counting may need.
    """
    captured = traced.captured
    found = compressible(captured, _LEAST)
    if density is not None:
        known = dict.fromkeys(rectified(captured, found), density)
    else:
        counted = densities(captured, found, leaves, limit)
        if isinstance(counted, str):
            return {}, f"{counted}; `density` would spare it that"
        known = counted
    ways = {}
    for b, share in known.items():
        aval: Any = captured.variables[b].aval
        room = min(share * (1 + _MARGIN), 1.0)
        nbytes = compressed_nbytes(aval.size, aval.dtype.itemsize, room)
        if nbytes <= _WORTH * captured.program.buffers[b].nbytes:
            ways[b] = nbytes
    if ways:
        return ways, ""
    least = f": of the emptiest {min(known.values()):.0%} are none" if known else ""
    return {}, f"of its {len(found)} large residuals none has enough zeros{least}"


def with_compressed(traced: Traced, ways: Sequence[tuple[int, int]]) -> Traced:
    """`traced` with each buffer of `ways` compressed into so many bytes."""
    return dataclasses.replace(traced, captured=compressed(traced.captured, ways))
