"""machine: measures the rates that a device and its link achieve."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.core.cards import machine_for
from vmem_jax.core.machine import Machine
from vmem_jax.devices.device import total_nbytes
from vmem_jax.errors import VmemError
from vmem_jax.profile.link import Rates, link_rates
from vmem_jax.profile.timing import seconds_a_call

_NORMAL = 1 << 16  # random numbers, repeated: data of zeros runs faster than a GPU's power allows


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that are large enough to reach a device's rates, and still quick.

    Attributes:
      product: n of an n × n × n matrix product.
      images: (batch, side, channels) of a 3 × 3 convolution.
      nbytes: bytes of a copy, in device memory and over the link.
    """

    product: int
    images: tuple[int, int, int]
    nbytes: int


SIZES = {
    "gpu": Sizes(8192, (64, 56, 256), 1 << 30),
    "cpu": Sizes(512, (8, 28, 64), 1 << 26),
}
"""By platform. An H200 needs a millisecond for such a product, a CPU core a few."""


def measure(
    device: jax.Device,
    *,
    sizes: Sizes | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Machine:
    """Measures the rates of `device` in some seconds. What cannot be measured keeps the shipped
    figure.

    Args:
      sizes: the sizes of the work (default: `SIZES` of its platform).
      on_progress: called with the number of measurements done, their total, and the next one's name.
    """
    sizes = sizes or SIZES.get(device.platform, SIZES["gpu"])
    shipped = machine_for(device.device_kind)
    dtypes = ["bfloat16", "float16", "float32"]
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        dtypes.append("float64")
    todo: list[tuple[str, Callable[[], Any]]] = [
        *((f"products in {d}", lambda d=d: _product(device, sizes, d)) for d in dtypes),
        ("products in strict float32", lambda: _product(device, sizes, "float32", strict=True)),
        *((f"convolutions in {d}", lambda d=d: _convolution(device, sizes, d)) for d in dtypes),
        ("device memory", lambda: _bandwidth(device, sizes)),
        ("launches", lambda: _launch(device)),
        ("the link", lambda: link_rates(device, sizes.nbytes)),
    ]
    found: dict[str, Any] = {}
    for done, (what, run) in enumerate(todo):
        on_progress(done, len(todo), what)
        try:
            found[what] = run()
        except (jax.errors.JaxRuntimeError, VmemError, MemoryError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            logging.warning("%s of %s: not measured: %s", what, device.device_kind, first)
    on_progress(len(todo), len(todo), "")
    flops = {d: found.get(f"products in {d}", shipped.flops.get(d)) for d in dtypes}
    flops[""] = found.get("products in strict float32", shipped.flops[""])
    convolutions = {d: found.get(f"convolutions in {d}") for d in dtypes}
    rates: Rates = found.get("the link", Rates())
    here = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    return Machine(
        name=device.device_kind,
        flops={**shipped.flops, **{d: rate for d, rate in flops.items() if rate}},
        bandwidth=found.get("device memory", shipped.bandwidth),
        launch=found.get("launches", shipped.launch),
        memory=total_nbytes([here]),
        link_out=rates.out or shipped.link_out,
        link_in=rates.into or shipped.link_in,
        link_both=rates.both or shipped.link_both,
        link_delay=shipped.link_delay,  # not measured
        slice_start=shipped.slice_start,  # not measured
        convolutions={d: rate for d, rate in convolutions.items() if rate},
        pinning=rates.pinning or shipped.pinning,
        product=shipped.product,
        latency=shipped.latency,
        gap=shipped.gap,
        cached=shipped.cached,
        between=shipped.between,  # not measured
    )


def _random(device: jax.Device, shape: tuple[int, ...], dtype: str) -> jax.Array:
    normal = np.random.default_rng(0).standard_normal(_NORMAL, np.float32)
    return jax.device_put(np.resize(normal.astype(jnp.dtype(dtype)), shape), device)


def _seconds(fun: Callable[..., Any], *args: jax.Array) -> float:
    compiled = jax.jit(fun).lower(*args).compile()
    return seconds_a_call(lambda: compiled(*args), most=100)


def _product(device: jax.Device, sizes: Sizes, dtype: str, strict: bool = False) -> float:
    """Operations a second of a large product; `strict` does without TF32."""
    n = sizes.product
    x = _random(device, (n, n), dtype)
    precision = lax.Precision.HIGHEST if strict else None
    return 2 * n**3 / _seconds(lambda x, y: jnp.dot(x, y, precision=precision), x, x + 1)


def _convolution(device: jax.Device, sizes: Sizes, dtype: str) -> float:
    """Operations a second of a 3 × 3 convolution, channels last."""
    batch, side, channels = sizes.images
    x = _random(device, (batch, side, side, channels), dtype)
    kernel = _random(device, (3, 3, channels, channels), dtype)
    form = ("NHWC", "HWIO", "NHWC")
    conv = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=form)
    work = 2 * batch * side * side * 9 * channels * channels
    return work / _seconds(conv, x, kernel)


def _bandwidth(device: jax.Device, sizes: Sizes) -> float:
    """Bytes a second that an elementwise kernel reads and writes."""
    x = _random(device, (sizes.nbytes // 4,), "float32")
    return 2 * sizes.nbytes / _seconds(lambda x: x + 1, x)


def _launch(device: jax.Device) -> float:
    """Seconds that one more tiny kernel adds to a program."""
    x = _random(device, (256,), "float32")
    options: Any = compat.FENCE_OPTIONS.get(device.platform) or None

    def chain(count: int) -> float:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(count):
                x = lax.optimization_barrier(x * 0.5 + 1)  # or they become one kernel
            return x

        compiled = jax.jit(run).lower(x).compile(compiler_options=options)
        return seconds_a_call(lambda: compiled(x))

    short, long = 64, 256
    slope = (chain(long) - chain(short)) / (long - short)
    return slope if math.isfinite(slope) and slope > 0 else machine_for(device.device_kind).launch
