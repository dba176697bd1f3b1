"""The four calls that move a tensor, for traced programs.

    token = offload_start(x, token, arena=a, slot=0)    # after the last forward use of x
    token = offload_done(x, token, arena=a, slot=0)     # from here on x's memory is free
    buffer = fetch_start(token, like, arena=a, slot=0)  # the memory is taken again
    x = fetch_done(buffer, arena=a, slot=0)             # before the first backward use

XLA orders by data dependence alone, so each point has an optimization barrier on both sides, over the
token or the buffer and a running value. Between `fetch_start` and `fetch_done` the buffer must have
no
other reader: XLA would copy it while the transfer still writes it. All four calls must be in one
computation, or in a forward and a backward loop of it.

In a step on several devices each call is in a `shard_map`: every device moves its own shard, in an
arena of its own. Each device has its own token, although the token's type says replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from vmem_jax.transfer import extension
from vmem_jax.transfer.arena import Arena
from vmem_jax.transfer.extension import PREFIX, load
from vmem_jax.transfer.layout import Layout
from vmem_jax.transfer.transport import WHOLE, AbstractTransport

TOKEN = jax.ShapeDtypeStruct((), jnp.uint8)
"""What orders calls; its value is never read. Any value can stand for the first."""


def first_token() -> jax.Array:
    """A token that waits for nothing."""
    return jnp.zeros(TOKEN.shape, TOKEN.dtype)


def offload_start(
    x: jax.Array, token: jax.Array, *tokens: jax.Array, arena: int, slot: int
) -> jax.Array:
    """Begins to copy `x` (any shape and dtype) out, after the operations of the tokens; returns a
    token. In a loop it pushes onto the slot's stack."""
    return _call("offload_start", TOKEN, x, token, *tokens, arena=arena, slot=slot)


def offload_done(x: jax.Array, token: jax.Array, *, arena: int, slot: int) -> jax.Array:
    """Waits for the copy of `x`; returns a token. `x` is an operand so that XLA keeps it until
    then."""
    return _call("offload_done", TOKEN, x, token, arena=arena, slot=slot)


def fetch_start(token: jax.Array, like: Any, *, arena: int, slot: int) -> jax.Array:
    """Begins to copy the last tensor parked in `slot` back; returns the destination buffer.

    Args:
      token: the token of its `offload_done`; in a loop, the tensor that was fetched before.
      like: an array or `jax.ShapeDtypeStruct` of the tensor's shape and dtype.
      arena: the id of the arena.
      slot: the index of the slot in the arena's layout.
    """
    out = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return _call("fetch_start", out, token, arena=arena, slot=slot)


def fetch_done(buffer: jax.Array, *, arena: int, slot: int) -> jax.Array:
    """Waits for the copy into `buffer`; returns the tensor, in the same memory."""
    out = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
    return _call("fetch_done", out, buffer, arena=arena, slot=slot, aliases={0: 0})


def fetch_done_in_turn(
    buffer: jax.Array, *tokens: jax.Array, arena: int, slot: int
) -> tuple[jax.Array, jax.Array]:
    """`fetch_done` after the operations of `tokens`; also returns a token.

    An `offload_start` with that token may reuse this tensor's memory in the arena.
    """
    out = (jax.ShapeDtypeStruct(buffer.shape, buffer.dtype), TOKEN)
    call = _bound("fetch_done", out, aliases={0: 0})
    x, token = call(buffer, *tokens, arena=np.int64(arena), slot=np.int64(slot))
    return x, token


class Ffi(AbstractTransport):
    """Transfers through these calls and an arena of their own, which is freed with this object."""

    name: ClassVar[str] = "ffi"
    fenced_behind: ClassVar[bool] = True

    def __init__(
        self, layout: Layout, *, mesh: AbstractMesh | None = None, host_budget: int | None = None
    ) -> None:
        """An arena of `layout`, not yet pinned.

        Args:
          mesh: of a step on several devices.
          host_budget: as in `Arena`.
        """
        self.arena: Arena = Arena(layout, host_budget=host_budget)
        self._mesh = mesh

    def start(
        self,
        x: jax.Array,
        *,
        slot: int,
        spec: PartitionSpec = WHOLE,
        after: Sequence[jax.Array] = (),
    ) -> jax.Array:
        """As the interface has it, `after` what these tokens wait for; in a loop, the last token of
        this slot is one."""
        tokens = [*after] or [first_token()]
        call = lambda x, *tokens: offload_start(x, *tokens, arena=self.arena.id, slot=slot)
        return self._each(call, (spec, *[WHOLE] * len(tokens)), WHOLE)(x, *tokens)

    def gone(
        self, x: jax.Array, held: jax.Array, *, slot: int, spec: PartitionSpec = WHOLE
    ) -> jax.Array:
        call = lambda x, token: offload_done(x, token, arena=self.arena.id, slot=slot)
        return self._each(call, (spec, WHOLE), WHOLE)(x, held)

    def fetch(
        self,
        held: jax.Array,
        like: jax.ShapeDtypeStruct,
        *,
        slot: int,
        spec: PartitionSpec = WHOLE,
    ) -> jax.Array:
        """As the interface has it; in a loop, `held` may be the tensor that was fetched before."""
        shape = like.shape
        if self._mesh is not None:
            shape = NamedSharding(self._mesh, spec).shard_shape(shape)
        shard = jax.ShapeDtypeStruct(shape, like.dtype)
        call = lambda token: fetch_start(token, shard, arena=self.arena.id, slot=slot)
        return self._each(call, (spec if held.shape else WHOLE,), spec)(held)

    def back(self, held: jax.Array, *, slot: int, spec: PartitionSpec = WHOLE) -> jax.Array:
        call = lambda buffer: fetch_done(buffer, arena=self.arena.id, slot=slot)
        return self._each(call, (spec,), spec)(held)

    def back_in_turn(
        self,
        held: jax.Array,
        *,
        slot: int,
        spec: PartitionSpec = WHOLE,
        after: Sequence[jax.Array] = (),
    ) -> tuple[jax.Array, jax.Array]:
        """`back`, after what the tokens `after` wait for; returns a token, too."""
        call = lambda x, *tokens: fetch_done_in_turn(x, *tokens, arena=self.arena.id, slot=slot)
        return self._each(call, (spec, *[WHOLE] * len(after)), (spec, WHOLE))(held, *after)

    def prepare(self, compiled: Any, devices: Sequence[jax.Device]) -> None:
        """Pins the arena on every device."""
        for device in devices:
            self.arena.pin(device)

    def _each(
        self,
        call: Callable,
        in_specs: tuple[PartitionSpec, ...],
        out_spec: PartitionSpec | tuple[PartitionSpec, ...],
    ) -> Callable:
        """`call` on each device's own shards."""
        if self._mesh is None:
            return call
        return jax.shard_map(
            call, mesh=self._mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False
        )


def unusable(
    platform: str, devices: Sequence[jax.Device], mesh: AbstractMesh | None, inlined: bool
) -> str:
    """Why a step cannot use these calls; "" if it can.

    Args:
      platform: the platform it is compiled for, "cpu" or "gpu".
      devices: the devices it runs on.
      mesh: the mesh of its arguments, if there are several devices.
      inlined: whether it is called inside another jit.
    """
    if inlined:
        return "it is called inside another jit, whose executable would own the arena"
    try:
        platforms = extension.load().targets()
    except ImportError as error:
        return str(error)
    name = "cpu" if platform == "cpu" else "CUDA"
    if name not in platforms:
        return (
            "vmem_jax's native extension was built without CUDA: install vmem_jax_cuda13, or "
            "vmem_jax's sources where CUDA is found"
        )
    foreign = sum(d.process_index != jax.process_index() for d in devices)
    if foreign:
        return (
            f"{foreign} of its {len(devices)} devices belong to other processes, whose arenas this "
            "one cannot pin"
        )
    if len(devices) > 1 and mesh is None:
        return (
            f"it runs on {len(devices)} devices, and each moves its own shards, which only a mesh "
            "tells: give all arguments that are on several devices a NamedSharding over one mesh"
        )
    return ""


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
      fail_slot: copies of this slot to the host fail;
      fail_fetch: or those back to the device.
      poison: NaN bytes in a destination at `fetch_start`, and in a slot after its fetch.
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
    call = _bound(name, out, aliases or {})
    return call(*operands, arena=np.int64(arena), slot=np.int64(slot))


def _bound(name: str, out: Any, aliases: dict[int, int]) -> Callable:
    load()
    # A side effect, so that XLA neither merges two equal calls nor removes one
    return jax.ffi.ffi_call(PREFIX + name, out, has_side_effect=True, input_output_aliases=aliases)
