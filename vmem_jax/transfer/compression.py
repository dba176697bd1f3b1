"""Zero-value compression of a tensor inside a step: two calls and their store.

    c = compress(x, store=s, site=0, capacity=n)    # after the last forward use of x
    x = decompress(c, like, store=s, site=0)        # before the first backward use

`c` is a byte array of planned size, so the compiler counts it and transfers can move it. Values
without room in it go to overflow memory of the store, so no step fails if a tensor becomes dense. It
is lossless, bit for bit; `xla_ffi/zero_values.h` has the format. The method is that of vDNN++,
section IV-C, before the link instead of behind it.

In a step every site is compressed once and then decompressed once, each fenced like transfers. In
loops a site has a slot for each iteration, and what was compressed last comes back first. On several
devices both calls are in a `shard_map`, and sizes are those of a shard.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jexc
from jax.interpreters import mlir

from vmem_jax.core.compression import min_capacity
from vmem_jax.jax_compat import FFI_EFFECT
from vmem_jax.transfer.extension import PREFIX, as_dataclass, handler_device, load
from vmem_jax.transfer.registered import Registered, wait_for_runs

compress_p = jexc.Primitive("compress")
decompress_p = jexc.Primitive("decompress")

_SUB_BYTE = {"int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"}


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A tensor of `raw_nbytes` that a step compresses into a byte array of `capacity` bytes; in a
    loop, `slots` tensors, of which a later loop decompresses the last one first."""

    raw_nbytes: int
    capacity: int
    slots: int = 1

    def __post_init__(self) -> None:
        if min(self.raw_nbytes, self.capacity) < 0 or self.slots < 1:
            raise ValueError(f"a site has no negative sizes, and at least one slot: {self}.")


@dataclasses.dataclass(frozen=True, slots=True)
class SiteCounters:
    """Counts of one site on one device since its store was opened there.

    Attributes:
      runs: how often the tensor was compressed.
      elements: the elements of all runs. A complex128 counts as two.
      values: the elements that were not zero.
      overflow_nbytes: bytes of values without room in the byte array, of all runs.
    """

    runs: int
    elements: int
    values: int
    overflow_nbytes: int

    @property
    def density(self) -> float:
        """The share of elements that were not zero; 0 where there were none."""
        return self.values / self.elements if self.elements else 0.0


class Store(Registered):
    """The counters and overflow memory of the compressed tensors of one executable.

    Open it on every device before the first run. It reserves addresses for the overflow of all sites,
    which use no memory until a tensor is denser than its capacity.

    Attributes:
      sites: the sites, by the index that the calls use.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        """Registers `sites`; takes nothing yet."""
        extension = load()
        self.sites = tuple(sites)
        # older builds do not know slots
        slots = lambda s: {"slots": s.slots} if s.slots > 1 else {}
        native = [
            extension.Site(nbytes=s.raw_nbytes, capacity=s.capacity, **slots(s)) for s in self.sites
        ]
        super().__init__(extension.store_create(native), extension.store_free)

    def open(self, device: jax.Device) -> None:
        """Makes the store ready on `device`, unless that has been done.

        Args:
          device: a CPU or CUDA device of this process.

        Raises:
          MemoryError: there are not so many addresses, or no memory for the counters.
          RuntimeError: a GPU that cannot reach host memory by its addresses while the host does
            (`concurrentManagedAccess`), so that nothing could overflow.
          ValueError: there is no compression for this platform here.
        """
        where = handler_device(device)
        if where in self._ready:
            return
        load().store_open(self.id, *where)
        self._ready.add(where)

    def reset(self, device: jax.Device) -> None:
        """Gives back the overflow memory of failed runs on `device`; no run may be in flight."""
        load().store_reset(self.id, *handler_device(device))

    def counters(self, device: jax.Device) -> tuple[SiteCounters, ...]:
        """What happened on `device` so far, by site. Waits for what runs there."""
        wait_for_runs()
        return tuple(
            as_dataclass(SiteCounters, site)
            for site in load().store_counters(self.id, *handler_device(device))
        )


def unusable(platform: str) -> str:
    """Why a step for `platform`, "cpu" or "gpu", cannot use the two calls, or "" where it can."""
    try:
        targets = load().targets()
    except ImportError as error:
        return str(error)
    if compress_p.name in targets.get("cpu" if platform == "cpu" else "CUDA", ()):
        return ""
    return (
        "vmem_jax's native extension was built without nvcc, CUDA's compiler: install "
        "vmem_jax_cuda13, or vmem_jax's sources where nvcc is found"
    )


def unusable_in_loops() -> str:
    """Why a loop cannot use the two calls where a step can, or ""."""
    has_slots = hasattr(load().Site, "slots")
    return "" if has_slots else "vmem_jax's native extension is older than vmem_jax: build it again"


def cannot_overflow(device: jax.Device) -> str:
    """Why a tensor that turns dense on `device` would have nowhere to go, or "" where it can."""
    elements = 1 << 20
    with Store([Site(elements, min_capacity(elements, 1))]) as store:
        try:
            store.open(device)
        except (MemoryError, RuntimeError) as error:
            return str(error)
    return ""


def live_stores() -> int:
    """How many stores this process has that are not freed."""
    return load().store_count()


def compress(x: jax.Array, *, store: int, site: int, capacity: int) -> jax.Array:
    """`x` without its zeros, as u8[capacity]; values without room go to the store's overflow memory.

    Args:
      x: any shape, of a dtype whose elements have 1, 2, 4, 8 or 16 bytes.
      store: the id of the store.
      site: the index in the store's sites; the site must have the sizes of `x` and of `capacity`.
      capacity: bytes, no fewer than `core.compression.min_capacity`.

    Raises:
      ValueError: the dtype has elements of less than a byte, or the capacity is too small.
    """
    load()
    smallest = _min_capacity(x)
    if capacity < smallest:
        raise ValueError(
            f"{x.dtype.name} {x.shape} cannot be compressed into {capacity} bytes: which of its "
            f"elements are zero takes {smallest}. Give site {site} at least that capacity."
        )
    if x.size == 0:  # XLA replaces what has no bytes, and calls for it, by constants
        return jnp.zeros(capacity, jnp.uint8)
    return compress_p.bind(x, store=store, site=site, capacity=capacity)


def decompress(c: jax.Array, like: Any, *, store: int, site: int) -> jax.Array:
    """The tensor that `compress` was given, bit for bit.

    Args:
      c: the result of `compress`, or a copy of it.
      like: an array or `jax.ShapeDtypeStruct` of the tensor's shape and dtype.
      store: the id of the store.
      site: the site of its `compress`, in the same run.
    """
    load()
    shape, dtype = tuple(like.shape), jnp.dtype(like.dtype)
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    return decompress_p.bind(c, shape=shape, dtype=dtype, store=store, site=site)


def _min_capacity(x: Any) -> int:
    dtype = jnp.dtype(x.dtype)
    if dtype.name in _SUB_BYTE:
        raise ValueError(
            f"{dtype.name} {x.shape} cannot be compressed: its elements are smaller than a byte."
        )
    return min_capacity(x.size, dtype.itemsize)


# -- what JAX has to know. The effect keeps XLA from merging, removing or repeating a call.


@compress_p.def_effectful_abstract_eval
def _compressed(x: Any, *, store: int, site: int, capacity: int) -> Any:
    return jax.core.ShapedArray((capacity,), jnp.uint8), {FFI_EFFECT}


@decompress_p.def_effectful_abstract_eval
def _decompressed(c: Any, *, shape: tuple[int, ...], dtype: np.dtype, store: int, site: int) -> Any:
    return jax.core.ShapedArray(shape, dtype), {FFI_EFFECT}


def _make_call(primitive: Any) -> None:
    """Lowers `primitive` to the custom call of its name, of a store and a site alone."""

    def lowered(ctx: Any, operand: Any, *, store: int, site: int, **_: Any) -> Any:
        call = jax.ffi.ffi_lowering(PREFIX + primitive.name, has_side_effect=True)
        return call(ctx, operand, store=np.int64(store), site=np.int64(site))

    primitive.def_impl(
        lambda operand, **params: jax.jit(functools.partial(primitive.bind, **params))(operand)
    )
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, lowered, platform=platform)


_make_call(compress_p)
_make_call(decompress_p)
