"""rows: indices that pick of every sample its own row, `x[jnp.arange(n), labels]`.

Such indices have the numbers of the samples in one column. Of a sub-batch they are the numbers in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vmem_jax.capture.layouts import Layout, Ruled, Where
from vmem_jax.jax_compat import Atom, JaxprEqn, Literal, Var

_Makers = Mapping[Var, JaxprEqn]


def own_rows(
    eqn: JaxprEqn, at: Sequence[Where], size: int, maker: _Makers
) -> tuple[Ruled, int] | None:
    """What `layouts.ruled` gives for a gather or scatter of each sample's own row, and the column of
    its indices that has the numbers of the samples; None for anything else.

    Args:
      at: the layout of each operand.
      size: of the batch, in samples.
      maker: the equations that make its operands.
    """
    name, numbers = eqn.primitive.name, eqn.params.get("dimension_numbers")
    if name == "gather":
        columns, gone = numbers.start_index_map, numbers.collapsed_slice_dims
        window, others_of = numbers.offset_dims, eqn.outvars[0]
    elif name in ("scatter", "scatter-add", "scatter_add", "scatter_mul"):
        columns, gone = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
        window, others_of = numbers.update_window_dims, eqn.invars[2]
    else:
        return None
    shape = eqn.invars[1].aval.shape
    rank = len(others_of.aval.shape)
    others = [d for d in range(rank) if d not in window]
    for column, dim in enumerate(columns):
        index = _own_index(eqn.invars[1], column, size, maker)
        if index is None or dim not in gone or eqn.invars[0].aval.shape[dim] != size:
            continue
        if index >= len(shape) - 1:
            continue
        wants = [Layout(dim), Layout(index)]
        out = Layout(others[index])
        wants += [out] if len(eqn.invars) > 2 else []
        if all(own in (None, want) for own, want in zip(at, wants, strict=True)):
            return (([out] if name == "gather" else [Layout(dim)]), wants), column
    return None


def _own_index(atom: Atom, column: int, size: int, maker: _Makers) -> int | None:
    """The dimension along which a column of indices counts the samples."""
    eqn = maker.get(atom) if isinstance(atom, Var) else None
    if eqn is None:
        return None
    if eqn.primitive.name == "concatenate":
        if eqn.params["dimension"] != len(eqn.outvars[0].aval.shape) - 1:
            return None
        for operand in eqn.invars:
            width = operand.aval.shape[-1]
            if column < width:
                return _counts(operand, size, maker) if width == 1 else None
            column -= width
    return _counts(atom, size, maker) if column == 0 else None


def _counts(atom: Atom, size: int, maker: _Makers) -> int | None:
    """The dimension along which a value counts 0, 1, 2, … over the batch, whatever stands beside."""
    eqn = maker.get(atom) if isinstance(atom, Var) else None
    if eqn is None:
        return None
    name, out = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name == "iota":
        dim = eqn.params["dimension"]
        return dim if out[dim] == size else None
    if name == "convert_element_type":
        return _counts(eqn.invars[0], size, maker)
    if name == "broadcast_in_dim":
        dim = _counts(eqn.invars[0], size, maker)
        return None if dim is None else int(eqn.params["broadcast_dimensions"][dim])
    if name in ("reshape", "squeeze", "expand_dims"):
        dim = _counts(eqn.invars[0], size, maker)
        long = [d for d, n in enumerate(out) if n > 1]
        return None if dim is None or len(long) != 1 else long[0]
    if name == "select_n":  # negative indices count from the end: there are none
        test = maker.get(eqn.invars[0]) if isinstance(eqn.invars[0], Var) else None
        if test is not None and test.primitive.name == "lt" and len(eqn.invars) == 3:
            bound = test.invars[1]
            below_zero = isinstance(bound, Literal) and not np.any(bound.val)
            if below_zero and test.invars[0] is eqn.invars[1]:
                return _counts(eqn.invars[1], size, maker)
    return None
