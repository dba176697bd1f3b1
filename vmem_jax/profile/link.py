"""link: measures what moves between device memory and pinned host memory, and what pinning costs."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.errors import VmemError
from vmem_jax.profile.timing import seconds_a_call
from vmem_jax.transfer import ffi
from vmem_jax.transfer.arena import Arena
from vmem_jax.transfer.extension import load
from vmem_jax.transfer.layout import Layout, Parked


@dataclasses.dataclass(frozen=True)
class Rates:
    """What was measured; None where it was not.

    Attributes:
      out: device to pinned host memory, bytes a second.
      into: pinned host memory to device, bytes a second.
      both: in total with both directions busy, bytes a second.
      pinning: seconds a byte.
    """

    out: float | None = None
    into: float | None = None
    both: float | None = None
    pinning: float | None = None


def link_rates(device: jax.Device, nbytes: int) -> Rates:
    """The rates of the link of `device`, with copies of `nbytes` each.

    On the CPU, where nothing is copied between two memories, a copy within the host stands for it.
    """
    if device.platform == "cpu":
        return _host_rates(nbytes)
    x = jax.device_put(np.ones(nbytes // 4, np.float32), device)
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    here = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    parked = jax.block_until_ready(jax.device_put(x, host))
    out = seconds_a_call(lambda: jax.device_put(x, host), most=4)
    into = seconds_a_call(lambda: jax.device_put(parked, here), most=4)
    if "CUDA" in _extension_platforms():
        try:
            both, pinning = _arena_seconds(device, x)
            both = max(both, out, into)  # a difference of two times: never less than either
            return Rates(nbytes / out, nbytes / into, 2 * nbytes / both, pinning / (2 * nbytes))
        except (VmemError, jax.errors.JaxRuntimeError) as error:
            logging.warning("both directions of the link: not by our own calls: %s", error)
    both = seconds_a_call(lambda: (jax.device_put(x, host), jax.device_put(parked, here)), most=4)
    return Rates(nbytes / out, nbytes / into, 2 * nbytes / both)


def _extension_platforms() -> Any:
    try:
        return load().targets()
    except ImportError:
        return ()


def _arena_seconds(device: jax.Device, x: jax.Array) -> tuple[float, float]:
    """(seconds of `x` out while another comes in, seconds of pinning memory for both).

    XLA's own copies may share a stream; ours have one for each direction. A tensor has to go out
    before it can come in, so the time of that alone is taken off.
    """
    fence = lambda *values: lax.optimization_barrier(values)

    def out(x: Any, token: Any, slot: int) -> Any:
        token, x = fence(ffi.offload_start(x, token, arena=arena.id, slot=slot), x)
        return ffi.offload_done(x, token, arena=arena.id, slot=slot)

    def back(x: Any, token: Any, slot: int) -> Any:
        buffer = ffi.fetch_start(token, x, arena=arena.id, slot=slot)
        return ffi.fetch_done(buffer, arena=arena.id, slot=slot)

    def alone(x: Any, y: Any) -> Any:
        return back(x, out(x, ffi.first_token(), 0), 0)

    def together(x: Any, y: Any) -> Any:
        token = out(x, ffi.first_token(), 0)
        buffer = ffi.fetch_start(token, x, arena=arena.id, slot=0)
        buffer, token, y = fence(buffer, token, y)
        token = ffi.offload_start(y, token, arena=arena.id, slot=1)
        token, buffer, y = fence(token, buffer, y)
        first = ffi.fetch_done(buffer, arena=arena.id, slot=0)
        first, token, y = fence(first, token, y)
        token = ffi.offload_done(y, token, arena=arena.id, slot=1)
        first, token = fence(first, token)
        return first, back(y, token, 1)

    options: Any = compat.FENCE_OPTIONS.get(device.platform) or None
    layout = Layout.of([Parked(x.nbytes, 0, 3), Parked(x.nbytes, 1, 4)])
    y = jnp.copy(x)
    with Arena(layout) as arena:
        began = time.perf_counter()
        arena.pin(device)
        pinning = time.perf_counter() - began
        runs = []
        for fun in (alone, together):
            lowered = compat.lower(jax.jit(fun, keep_unused=True), x, y)
            compiled = lowered.compile(compiler_options=options)
            run = functools.partial(compiled, x, y)
            runs.append(seconds_a_call(run, most=4))
        return max(runs[1] - runs[0], 1e-9), pinning


def _host_rates(nbytes: int) -> Rates:
    source, goal = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    seconds = seconds_a_call(lambda: np.copyto(goal, source), most=10)
    half = nbytes // 2
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # numpy copies without the GIL

        def twice() -> None:
            first = pool.submit(np.copyto, goal[:half], source[:half])
            second = pool.submit(np.copyto, source[half:], goal[half:])
            first.result(), second.result()

        both = seconds_a_call(twice, most=10)
    began = time.perf_counter()
    np.empty(nbytes, np.uint8).fill(1)  # the system hands pages out as they are first touched
    touched = time.perf_counter() - began
    return Rates(nbytes / seconds, nbytes / seconds, nbytes / both, touched / nbytes)
