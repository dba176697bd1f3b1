"""pick: the fastest configuration of one convolution by itself, within a limit of workspace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from vmem_jax.conv.slices import layouts, roles, whole
from vmem_jax.conv.timings import known
from vmem_jax.core.cards import machine_for
from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro, Pass
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes, reuse


def undivided(convolution: Convolution) -> Configuration:
    """XLA's own convolution on the whole batch; its workspace and time are not known here."""
    return Configuration((Micro(convolution.batch, XLA, (), 0, math.nan),))


@functools.lru_cache(maxsize=4096)
def choose(convolution: Convolution, limit: int | None) -> Configuration:
    """The fastest configuration whose workspace is within `limit` bytes; XLA's own for None.

    The candidates are what `vmem-jax profile --conv` timed on this GPU, or else slices of XLA's own
    convolution, of the whole batch and of powers of two.

    Raises:
      WorkspaceError: not even one sample at a time is within `limit`.
    """
    if limit is None:
        return undivided(convolution)
    device = jax.devices()[0]
    if device.platform == "gpu":
        with contextlib.suppress(ImportError):  # no extension, or one without cuDNN
            if micros := known(device)(convolution):
                return reuse(convolution, micros, limit)
    micros = [by_xla(convolution)]
    for batch in batch_sizes(convolution.batch, BatchSizes.POWER_OF_TWO):
        if micros[-1].workspace <= limit and convolution.batch % micros[-1].batch == 0:
            break  # smaller ones take longer
        if batch < convolution.batch:
            micros.append(slice_by_xla(convolution.with_batch(batch)))
    return reuse(convolution, micros, limit)


@functools.lru_cache(maxsize=4096)
def by_xla(convolution: Convolution) -> Micro:
    """The whole of `convolution` as one micro-configuration of XLA's own.

    Its workspace is what XLA takes beside operands and result when it compiles the convolution alone
    for the default device; its seconds are the roofline's.
    """
    operands = [
        jax.ShapeDtypeStruct(shape, convolution.dtype) for shape in _shapes(convolution)[:2]
    ]
    compiled = jax.jit(functools.partial(whole, convolution)).lower(*operands).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "CPU and GPU compilers of every supported version say it"
    machine = machine_for(jax.devices()[0].device_kind)
    seconds = machine.convolution_seconds(convolution)
    return Micro(convolution.batch, XLA, (), memory.temp_size_in_bytes, seconds)


def slice_by_xla(convolution: Convolution) -> Micro:
    """The same where it is a part of a larger batch: the slices are there as well, copied."""
    micro = by_xla(convolution)
    lhs, rhs, out = map(math.prod, _shapes(convolution))
    itemsize = jnp.dtype(convolution.dtype).itemsize
    if convolution.which == Pass.BACKWARD_FILTER:  # the part and the sum so far, in float32
        copies = max(4, itemsize) * (lhs + rhs + 2 * out)
    else:
        copies = itemsize * (lhs + out)
    return dataclasses.replace(micro, workspace=micro.workspace + copies)


def _shapes(convolution: Convolution) -> list[tuple[int, ...]]:
    """Of both operands and the result."""
    shapes = layouts(convolution)
    return [shapes[role] for role in roles(convolution.which)]
