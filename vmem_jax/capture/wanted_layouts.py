"""wanted_layouts: how operands lie, so that an equation makes a value for a part of the batch alone.

Such a value is the same for all samples, but as large as the batch: a dropout mask, zeros. One rule
per primitive gives the layouts of the operands from that of the result.
"""

from __future__ import annotations

from vmem_jax.capture.layouts import Layout, Where, is_by_key, reshaped
from vmem_jax.capture.primitives import ELEMENTWISE, shape_of
from vmem_jax.jax_compat import JaxprEqn


def wanted(eqn: JaxprEqn, layout: Layout, size: int) -> list[Where] | None:
    """How the operands of `eqn`, which is the same for all samples, must lie for its result to lie
    like `layout`; None where no rule makes it for a part of the batch."""
    name, out = eqn.primitive.name, shape_of(eqn.outvars[0])
    if name == "iota":
        return []
    if name == "broadcast_in_dim" and len(eqn.invars) == 1:
        dims = [int(d) for d in eqn.params["broadcast_dimensions"]]
        if layout.dim not in dims:
            return [None]
        dim = dims.index(layout.dim)
        return [None if shape_of(eqn.invars[0])[dim] == 1 else layout.at(dim)]
    if name in ELEMENTWISE:
        along = lambda shape: len(shape) > layout.dim and shape[layout.dim] == out[layout.dim]
        return [layout if along(shape_of(a)) else None for a in eqn.invars]
    if name in ("reshape", "squeeze", "expand_dims"):
        if name == "reshape" and eqn.params["dimensions"] is not None:
            return None
        back = reshaped(layout, out, shape_of(eqn.invars[0]), size)
        return None if back is None else [back]
    if name in ("pack_bits", "unpack_bits"):
        return [layout] if layout.dim != eqn.params["axis"] else None
    if name == "transpose":
        return [layout.at(eqn.params["permutation"][layout.dim])]
    if name == "pad":
        still = tuple(eqn.params["padding_config"][layout.dim]) == (0, 0, 0)
        return [layout, None] if still else None
    if name == "slice":
        return [layout] if shape_of(eqn.invars[0])[layout.dim] == out[layout.dim] else None
    if name == "concatenate" and eqn.params["dimension"] != layout.dim:
        return [layout] * len(eqn.invars)
    if name == "stack" and eqn.params["axis"] != layout.dim:
        return [layout.at(layout.dim - (eqn.params["axis"] < layout.dim))] * len(eqn.invars)
    if name in ("random_bits", "random_split", "random_wrap") and is_by_key(eqn):
        keys = len(shape_of(eqn.invars[0])) - (name == "random_wrap")
        return [layout] if layout.dim < keys else None
    return None
