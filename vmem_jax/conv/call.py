"""call: a pass of a convolution by cuDNN, through the custom call of docs/ffi.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from vmem_jax.conv.slices import layouts, roles, with_epilogue
from vmem_jax.core.convolution import XLA, Configuration, Convolution, Epilogue, Pass
from vmem_jax.transfer import extension

TARGET = extension.PREFIX + "micro_conv"


def by_cudnn(
    lhs: jax.Array,
    rhs: jax.Array,
    *bias: jax.Array,
    convolution: Convolution,
    configuration: Configuration,
    limit: int | None = None,
    target: str = TARGET,
) -> jax.Array:
    """The micro-batches of `configuration`, all by engines of cuDNN; operands as for `in_slices`.

    With the epilogue of `convolution`, if it has one, but of bare micro-batches; `bias` is then of
    shape (K,), or none.

    Raises:
      As `all_by_cudnn`.
    """
    [result] = all_by_cudnn(
        lhs, rhs, *bias, convolution=convolution, configuration=configuration, target=target
    )
    if bias and configuration.bare_samples:
        return _completed(convolution, configuration, result, *bias)
    return result


def all_by_cudnn(
    lhs: jax.Array,
    rhs: jax.Array,
    *vectors: jax.Array,
    convolution: Convolution,
    configuration: Configuration,
    target: str = TARGET,
) -> list[jax.Array]:
    """The result of the call, and both of its sums, if its epilogue is those.

    The workspace is a result of the call, so that the compiler counts it. Gradients to w in 16 bits
    come one for each micro-batch and are added in float32 here: cuDNN has no kernel from such
    operands to a float32 result, and its own accumulation would round after each.

    Args:
      vectors: scale and bias of the prologue, (C,) each, if there is one; then a bias (K,), likewise.

    Raises:
      ValueError: a micro-batch is XLA's.
      ImportError: the extension was not built, or without cuDNN.
    """
    if any(m.engine == XLA for m in configuration.micros):
        raise ValueError(
            "a configuration is either XLA's or cuDNN's; this one has engines of both."
        )
    if extension.load().CUDNN_BUILT is None:
        raise ImportError(
            "vmem_jax's extension was built without cuDNN, so it cannot run the convolutions of this "
            'plan. Install vmem_jax_cuda13 (docs/ffi.md), or plan without "workspace".'
        )
    shape = layouts(convolution)[roles(convolution.which)[2]]
    partials = convolution.which == Pass.BACKWARD_FILTER and lhs.dtype.itemsize == 2
    if partials:
        shape = (len(configuration.micros), *shape)
    results = [
        jax.ShapeDtypeStruct(shape, lhs.dtype),
        jax.ShapeDtypeStruct((configuration.workspace,), "uint8"),
    ]
    if convolution.epilogue == Epilogue.SUMS:
        each = (len(configuration.micros), 2, convolution.features_out)
        results.append(jax.ShapeDtypeStruct(each, "float32"))
    call = jax.ffi.ffi_call(target, results)
    made: Sequence[jax.Array] = call(
        lhs, rhs, *vectors, **attributes(convolution, configuration, partials)
    )
    result, _, *sums = made
    result = result.astype(jnp.float32).sum(0).astype(lhs.dtype) if partials else result
    return [result, *(total for each in sums for total in each.sum(0))]


def _completed(
    convolution: Convolution, configuration: Configuration, y: jax.Array, bias: jax.Array
) -> jax.Array:
    """`y` with the epilogue also where the call left it out: one pass over all of it, in place."""
    samples = np.zeros(convolution.batch, bool)
    for start, end in configuration.bare_samples:
        samples[start:end] = True
    is_bare = jnp.asarray(samples).reshape(-1, *(1,) * (y.ndim - 1))
    return jnp.where(is_bare, with_epilogue(convolution, y, bias), y)


def attributes(c: Convolution, configuration: Configuration, partials: bool) -> dict[str, Any]:
    """Those of the call."""
    integers = lambda values: np.array(list(values), np.int64)
    micros: list[int] = []
    for micro in configuration.micros:
        knobs = [number for knob in micro.knobs for number in knob]
        micros += [micro.batch, micro.engine, micro.channels, micro.bare, len(micro.knobs), *knobs]
    pads: Iterable[tuple[int, int]] = c.padding
    return {
        "which": str(c.which),
        "epilogue": str(c.epilogue),
        "channels_last": c.channels_last,
        "strides": integers(c.strides),
        "padding_low": integers(low for low, _ in pads),
        "padding_high": integers(high for _, high in pads),
        "dilation": integers(c.dilation),
        "partials": partials,
        "micros": integers(micros),
    }


def lower(
    primitive: Any, in_slices: Callable[..., Any], by_engines: Callable[..., Any] = by_cudnn
) -> None:
    """Lowers `primitive`, of a convolution by a configuration, to this call on an NVIDIA GPU.

    Elsewhere, and where all micro-batches are XLA's own, it is `in_slices`: on a CPU those of
    cuDNN's engines run, too.
    """

    def on_cuda(*operands: jax.Array, **params: Any) -> Any:
        engines = {m.engine for m in params["configuration"].micros}
        return (in_slices if engines == {XLA} else by_engines)(*operands, **params)

    primitive.def_impl(
        lambda *operands, **params: jax.jit(functools.partial(primitive.bind, **params))(*operands)
    )
    lowered = functools.partial(mlir.lower_fun, multiple_results=primitive.multiple_results)
    mlir.register_lowering(primitive, lowered(in_slices))
    mlir.register_lowering(primitive, lowered(on_cuda), platform="cuda")
