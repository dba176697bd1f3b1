"""The four calls that move a tensor, to be bound in a traced program.

    token = offload_start(x, token, arena=a, slot=0)    # after the last forward use of x
    token = offload_done(x, token, arena=a, slot=0)     # from here on x's memory is free
    buffer = fetch_start(token, like, arena=a, slot=0)  # the memory is taken again
    x = fetch_done(buffer, arena=a, slot=0)             # before the first backward use

XLA orders by data dependence alone, so each point is fenced on both sides by an optimization
barrier over the token, or the buffer, and a running value. Between `fetch_start` and `fetch_done`
the buffer has no other reader: XLA would copy it while the transfer is still writing it. All four in
one computation, or in a forward and a backward loop of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vmem_jax.transfer.extension import PREFIX, load

TOKEN = jax.ShapeDtypeStruct((), jnp.uint8)
"""What orders calls; its value means nothing. Any value can stand for the first."""


def first_token() -> jax.Array:
    """A token that waits for nothing."""
    return jnp.zeros(TOKEN.shape, TOKEN.dtype)


def offload_start(x: jax.Array, token: jax.Array, *, arena: int, slot: int) -> jax.Array:
    """Begins to copy `x` (any shape and dtype) out; returns a token. Pushes, in a loop."""
    return _call("offload_start", TOKEN, x, token, arena=arena, slot=slot)


def offload_done(x: jax.Array, token: jax.Array, *, arena: int, slot: int) -> jax.Array:
    """Waits until `x` is out; returns a token. It takes `x` so that XLA keeps it until then."""
    return _call("offload_done", TOKEN, x, token, arena=arena, slot=slot)


def fetch_start(token: jax.Array, like: Any, *, arena: int, slot: int) -> jax.Array:
    """Begins to copy the last tensor parked in `slot` back; returns the buffer that it goes to.

    Args:
      token: from its `offload_done`.
      like: an array or `jax.ShapeDtypeStruct` of the tensor's shape and dtype.
      arena: its id.
      slot: index in the arena's layout.
    """
    out = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return _call("fetch_start", out, token, arena=arena, slot=slot)


def fetch_done(buffer: jax.Array, *, arena: int, slot: int) -> jax.Array:
    """Waits until the tensor is in `buffer`, and returns it: the same memory."""
    out = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
    return _call("fetch_done", out, buffer, arena=arena, slot=slot, aliases={0: 0})


def inject(
    *,
    delay_seconds: float = 0.0,
    fail_slot: int = -1,
    fail_fetch: bool = False,
    poison: bool = False,
    poison_source: bool = False,
    skip_waits: bool = False,
    stale_seconds: float = 30.0,
) -> None:
    """Faults on purpose in every transfer from now on, for tests; without arguments, none.

    Args:
      delay_seconds: before each copy, on its lane.
      fail_slot: copies of this slot fail, on their way out;
      fail_fetch: or on their way back.
      poison: NaN bytes in a destination at `fetch_start`, and in a place after its fetch.
      poison_source: NaN bytes in `x` at `offload_done`, whose last reader that must be.
      skip_waits: done calls do not wait; then the other faults must show in the results.
      stale_seconds: how long a run that shows no life may keep others from an arena. No fault.
    """
    load().inject(
        delay_seconds=delay_seconds,
        fail_slot=fail_slot,
        fail_fetch=fail_fetch,
        poison=poison,
        poison_source=poison_source,
        skip_waits=skip_waits,
        stale_seconds=stale_seconds,
    )


def _call(
    name: str,
    out: jax.ShapeDtypeStruct,
    *operands: jax.Array,
    arena: int,
    slot: int,
    aliases: dict[int, int] | None = None,
) -> jax.Array:
    load()
    # A side effect, so that XLA neither merges two equal calls nor removes one
    call = jax.ffi.ffi_call(
        PREFIX + name, out, has_side_effect=True, input_output_aliases=aliases or {}
    )
    return call(*operands, arena=np.int64(arena), slot=np.int64(slot))
