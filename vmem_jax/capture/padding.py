"""padding: what convolutions read with more zeros on one side exists with them, on a GPU.

cuDNN pads both sides alike. What one side has more XLA writes around a copy of x in front of its
call. "SAME" of strides of two on even sizes is so, as in the first block of a stage. A fence around
x leaves x, a copy for the forward pass and one more for the gradient to the kernel. Without them a
MobileNetV2(128) writes 8.1 GiB in place of 10.0.

Written out, x exists padded alone, made so by what makes it. The gradient to x is left to XLA: it
cuts it off, or pads the gradient to y.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.convolutions import match
from vmem_jax.capture.editor import spliced, with_each_replaced
from vmem_jax.capture.flatten import merge_repeated
from vmem_jax.core.convolution import Pass
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var


def with_padding_apart(flat: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """`flat` whose convolutions pad both sides alike, but for those of arguments.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
    """
    if platform != "gpu":
        return flat
    opened = compat.open_jaxpr(flat)
    given = {*opened.invars, *opened.constvars}
    padded: list[JaxprEqn] = []
    apart = with_each_replaced(flat, lambda _: lambda eqn: _apart(eqn, given, padded))
    return merge_repeated(apart) if padded else flat


def _apart(eqn: JaxprEqn, given: set[Var], padded: list[JaxprEqn]) -> Sequence[JaxprEqn]:
    """`eqn`, or what pads apart in its place; `eqn` is then added to `padded`."""
    matched = match(eqn, {})
    is_gradient = matched is not None and matched.convolution.which == Pass.BACKWARD_DATA
    if matched is None or is_gradient or eqn.invars[0] in given:
        return [eqn]
    pads = matched.convolution.padding
    if all(low == high for low, high in pads):
        return [eqn]
    more = [(low, high) if low != high else (0, 0) for low, high in pads]  # as XLA does
    own = [
        (low - a, high - b) for (low, high), (a, b) in zip(eqn.params["padding"], more, strict=True)
    ]
    if min(map(min, own)) < 0 or any(d != 1 for d in eqn.params["lhs_dilation"]):
        return [eqn]
    x, w = eqn.invars
    around = [(0, 0, 0)] * len(x.aval.shape)
    for d, (low, high) in zip(matched.numbers.lhs_spec[2:], more, strict=True):
        around[d] = (low, high, 0)

    def pad(x: jax.Array) -> jax.Array:
        return lax.pad(x, lax.full((), 0, x.dtype), around)

    padded.append(eqn)
    pads_x, larger = spliced(pad, [x], eqn)
    return [*pads_x, eqn.replace(invars=[larger, w], params={**eqn.params, "padding": tuple(own)})]
