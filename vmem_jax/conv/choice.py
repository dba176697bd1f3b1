"""choice: the fastest configuration of one convolution by itself, within a limit of workspace."""

from __future__ import annotations

import functools
import math

import jax

from vmem_jax.conv.slices import layouts, roles, whole
from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro
from vmem_jax.core.costs import machine_for
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes, reuse


def undivided(convolution: Convolution) -> Configuration:
    """XLA's own convolution on the whole batch; its workspace and time are not known here."""
    return Configuration((Micro(convolution.batch, XLA, (), 0, math.nan),))


@functools.lru_cache(maxsize=4096)
def choose(convolution: Convolution, limit: int | None) -> Configuration:
    """The fastest configuration whose workspace is within `limit` bytes; XLA's own for None.

    The candidates are slices of XLA's own convolution, of the whole batch and of powers of two.

    Raises:
      WorkspaceError: not even one sample at a time is within `limit`.
    """
    if limit is None:
        return undivided(convolution)
    micros = []
    for batch in batch_sizes(convolution.batch, BatchSizes.POWER_OF_TWO):
        micros.append(by_xla(convolution.with_batch(batch)))
        if micros[-1].workspace <= limit and convolution.batch % batch == 0:
            break  # smaller ones take longer
    return reuse(convolution, micros, limit)


@functools.lru_cache(maxsize=4096)
def by_xla(convolution: Convolution) -> Micro:
    """The whole of `convolution` as one micro-configuration of XLA's own.

    Its workspace is what XLA takes beside operands and result when it compiles the convolution alone
    for the default device; its seconds are the roofline's.
    """
    shapes = layouts(convolution)
    first, second, _ = roles(convolution.which)
    operands = [jax.ShapeDtypeStruct(shapes[r], convolution.dtype) for r in (first, second)]
    compiled = jax.jit(functools.partial(whole, convolution)).lower(*operands).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "CPU and GPU compilers of every supported version say it"
    machine = machine_for(jax.devices()[0].device_kind)
    seconds = machine.convolution_seconds(convolution)
    return Micro(convolution.batch, XLA, (), memory.temp_size_in_bytes, seconds)
