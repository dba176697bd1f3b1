"""The custom call `vmem_jax_micro_conv`, as docs/ffi.md has it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from vmem_jax.conv.slices import layouts, roles
from vmem_jax.core.convolution import Configuration, Convolution, Pass
from vmem_jax.transfer import extension

TARGET = "vmem_jax_micro_conv"


def attributes(c: Convolution, configuration: Configuration, partials: bool):
    integers = lambda values: np.array(list(values), np.int64)
    micros = []
    for micro in configuration.micros:
        knobs = [number for knob in micro.knobs for number in knob]
        micros += [micro.batch, micro.engine, len(micro.knobs), *knobs]
    return {
        "which": str(c.which),
        "channels_last": c.channels_last,
        "strides": integers(c.strides),
        "padding_low": integers(low for low, _ in c.padding),
        "padding_high": integers(high for _, high in c.padding),
        "dilation": integers(c.dilation),
        "partials": partials,
        "micros": integers(micros),
    }


def micro_conv(c: Convolution, configuration: Configuration, lhs, rhs, target: str = TARGET):
    """One pass by cuDNN; 16-bit gradients to w are added in float32."""
    extension.load()
    shape = layouts(c)[roles(c.which)[2]]
    partials = c.which == Pass.BACKWARD_FILTER and c.dtype in ("bfloat16", "float16")
    if partials:
        shape = (len(configuration.micros), *shape)
    results = (
        jax.ShapeDtypeStruct(shape, c.dtype),
        jax.ShapeDtypeStruct((configuration.workspace,), "uint8"),
    )
    call = jax.ffi.ffi_call(target, results)
    result, _ = call(lhs, rhs, **attributes(c, configuration, partials))
    return result.astype(jnp.float32).sum(0).astype(c.dtype) if partials else result
