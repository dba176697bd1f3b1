"""softmax: the exponentials of rows less their maxima, which XLA:GPU makes in a Triton kernel.

XLA (0.11.2) has a pass for what is computed of rows and of what these reduce to. Of a softmax whose
exponentials a loop stacks, that kernel takes the maxima and writes the exponentials, in float32. No
other kernel computes them again, and they are copied into the stack: those of ViT-L(64), 152 MiB, are
there beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import JaxprEqn, Var

_SPREADS = ("broadcast_in_dim", "convert_element_type", "max")
"""What stands between the maximum of a row and what is taken off it: `jax.nn.softmax` bounds it."""


def makes_exponentials(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> bool:
    """Whether `eqn` makes the exponentials of rows less their maxima, as a softmax does."""
    less = maker.get(eqn.invars[0]) if eqn.primitive.name == "exp" else None
    if less is None or less.primitive.name != "sub":
        return False
    row, most = less.invars
    while most in maker and class_of(maker[most]) is not Class.REDUCE:
        spread = maker[most]
        if class_of(spread) is not Class.VIEW and spread.primitive.name not in _SPREADS:
            return False
        most = spread.invars[-1]
    reduced = maker.get(most)
    if reduced is None or reduced.primitive.name != "reduce_max":
        return False
    return reduced.invars[0] is row and reduced.params["axes"] == (row.aval.ndim - 1,)
