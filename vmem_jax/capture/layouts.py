"""layouts: propagates through equations along which dimension of a value the samples lie.

There is one rule per primitive. It gives the layout of the results, and the layout that is required
of operands that are the same for all samples but as large as the batch (a dropout mask, zeros). If it
gives none, the equation mixes samples, or its primitive has no rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from vmem_jax.capture import cudnn_attention
from vmem_jax.capture.primitives import ELEMENTWISE, shape_of
from vmem_jax.jax_compat import JaxprEqn


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How the samples lie in a value: along one of its dimensions, of outer × batch × inner elements.

    `inner` is what a reshape merged behind the samples: of `[batch, time, width]` as
    `[batch * time, width]` it is the time. `outer` is what it merged in front of them.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """`shape` with `size` samples."""
        return (*shape[: self.dim], self.outer * size * self.inner, *shape[self.dim + 1 :])

    def at(self, dim: int) -> Layout:
        """The same along another dimension."""
        return dataclasses.replace(self, dim=dim)


SUMMED = "summed"
"""The layout of a result that is a sum over the samples."""

Where = Layout | None
Ruled = tuple[Sequence[Any], Sequence[Where]]
"""For each result a layout, None or `SUMMED`; for each operand the layout that it must have."""

_Rule = Callable[[JaxprEqn, Sequence[Where], int], Ruled | None]


def ruled(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    """The layouts of the results and operands of `eqn`; None if it mixes samples.

    Args:
      at: the layout of each operand, None for those that are the same for all samples.
      size: samples in the batch.
    """
    rule = _RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, at, size)


def reshaped(layout: Layout, shape: Sequence[int], new: Sequence[int], size: int) -> Layout | None:
    """How the samples lie in a value of `shape` once it is of shape `new`."""
    before = math.prod(shape[: layout.dim]) * layout.outer
    after = layout.inner * math.prod(shape[layout.dim + 1 :])
    for dim in range(len(new)):
        outer, o = divmod(before, max(math.prod(new[:dim]), 1))
        inner, i = divmod(after, max(math.prod(new[dim + 1 :]), 1))
        if not o and not i and new[dim] == outer * size * inner:
            return Layout(dim, outer, inner)
    return None


def _one(at: Sequence[Where]) -> Layout | None:
    """The layout that all batched operands share."""
    found = {layout for layout in at if layout is not None}
    return found.pop() if len(found) == 1 else None


def _last(eqn: JaxprEqn, count: int) -> range:
    """The last `count` dimensions of the first operand."""
    rank = len(shape_of(eqn.invars[0]))
    return range(rank - count, rank)


def _elementwise(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = _one(at)
    if layout is None:
        return None
    of = next(shape_of(a) for a, own in zip(eqn.invars, at, strict=True) if own is not None)
    whole = lambda a: len(shape_of(a)) > layout.dim and shape_of(a)[layout.dim] == of[layout.dim]
    wants = [layout if whole(a) else None for a in eqn.invars]
    return [layout] * len(eqn.outvars), wants


def _along_others(params: Callable[[JaxprEqn], Sequence[int]]) -> _Rule:
    """Elementwise, but along the dimensions that `params` gives."""

    def rule(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
        layout = _one(at)
        if layout is None or layout.dim in params(eqn):
            return None
        return _elementwise(eqn, at, size)

    return rule


def _broadcast_in_dim(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = at[0]
    if layout is None:
        return None
    dim = int(eqn.params["broadcast_dimensions"][layout.dim])
    return [layout.at(dim)], list(at)


def _reshape(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout, shape = at[0], [*shape_of(eqn.invars[0])]
    if layout is None:
        return None
    order = eqn.params.get("dimensions") if eqn.primitive.name == "reshape" else None
    if order is not None:  # it transposes first
        layout, shape = layout.at(list(order).index(layout.dim)), [shape[dim] for dim in order]
    new = reshaped(layout, shape, shape_of(eqn.outvars[0]), size)
    return None if new is None else ([new], list(at))


def _transpose(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = at[0]
    if layout is None:
        return None
    return [layout.at(list(eqn.params["permutation"]).index(layout.dim))], list(at)


def _reduce(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout, axes = at[0], eqn.params["axes"]
    if layout is None:
        return None
    if layout.dim in axes:
        return ([SUMMED], list(at)) if eqn.primitive.name == "reduce_sum" else None
    return [layout.at(layout.dim - sum(a < layout.dim for a in axes))], list(at)


def _concatenate(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = _one(at)
    if layout is None or layout.dim == eqn.params["dimension"]:
        return None
    return [layout], [layout] * len(eqn.invars)


def _stack(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = _one(at)
    if layout is None:
        return None
    moved = layout.at(layout.dim + (eqn.params["axis"] <= layout.dim))
    return [moved], [layout] * len(eqn.invars)


def _unstack(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout, axis = at[0], eqn.params["axis"]
    if layout is None or layout.dim == axis:
        return None
    return [layout.at(layout.dim - (axis < layout.dim))] * len(eqn.outvars), list(at)


def _pad(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = at[0]
    if layout is None or tuple(eqn.params["padding_config"][layout.dim]) != (0, 0, 0):
        return None
    return [layout], [layout, None]


def _slice(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = at[0]
    if layout is None:
        return None
    whole = shape_of(eqn.invars[0])[layout.dim] == shape_of(eqn.outvars[0])[layout.dim]
    return ([layout], list(at)) if whole else None


def _dynamic_slice(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    return None if any(at[1:]) else _slice(eqn, at, size)


def _dynamic_update_slice(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = _one(at)
    if layout is None or any(at[2:]):
        return None
    x, update = map(shape_of, eqn.invars[:2])
    if x[layout.dim] != update[layout.dim]:
        return None
    return [layout], [layout, layout, *at[2:]]


def _dot_general(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    (contract, batch) = eqn.params["dimension_numbers"]
    roles: list[tuple[str, int] | None] = []
    for side, layout in enumerate(at):
        if layout is None:
            roles.append(None)
        elif layout.dim in contract[side]:
            roles.append(("contracted", list(contract[side]).index(layout.dim)))
        elif layout.dim in batch[side]:
            roles.append(("batch", list(batch[side]).index(layout.dim)))
        else:
            others = {*contract[side], *batch[side]}
            free = [d for d in range(len(shape_of(eqn.invars[side]))) if d not in others]
            roles.append(("free", free.index(layout.dim)))
    side = 0 if at[0] is not None else 1
    layout, role = at[side], roles[side]
    assert layout is not None and role is not None
    kind, number = role
    if kind == "free":
        if at[1 - side] is not None:
            return None
        taken = len(batch[0])
        if side == 1:
            taken += len(shape_of(eqn.invars[0])) - len(contract[0]) - len(batch[0])
        return [layout.at(taken + number)], list(at)
    # both operands have the samples there
    dims = contract if kind == "contracted" else batch
    other = layout.at(dims[1 - side][number])
    if at[1 - side] not in (None, other):
        return None
    wants = [layout, other] if side == 0 else [other, layout]
    return [SUMMED if kind == "contracted" else layout.at(number)], wants


def _conv(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    lhs, rhs = at
    own = _own_groups(eqn, at, size)
    if own is not None:
        dim, (_, kernel) = numbers.out_spec[1], own[1]
        return [kernel.at(dim)], own[1]
    if lhs is not None and rhs is None and lhs.dim == numbers.lhs_spec[0]:
        whole = eqn.params["batch_group_count"] == 1
        return ([lhs.at(numbers.out_spec[0])], list(at)) if whole else None
    if rhs is not None and lhs is None and rhs.dim == numbers.rhs_spec[0]:
        whole = groups == eqn.params["batch_group_count"] == 1
        return ([rhs.at(numbers.out_spec[1])], list(at)) if whole else None
    contracted = (numbers.lhs_spec[1], numbers.rhs_spec[1])
    layout = lhs if lhs is not None else rhs
    assert layout is not None
    wants = [layout.at(dim) for dim in contracted]
    if groups != 1 or any(own not in (None, want) for own, want in zip(at, wants, strict=True)):
        return None
    return [SUMMED], wants


def _own_groups(
    eqn: JaxprEqn, at: Sequence[Where], size: int
) -> tuple[str, tuple[Layout, Layout]] | None:
    """The parameter that counts the groups of a convolution of which each sample has its own, as in
    a gradient of the kernel for each, and how the operands lie; None where it is no such."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    outer = next(layout.outer for layout in at if layout is not None)
    of_lhs = {"batch_group_count": numbers.lhs_spec[0], "feature_group_count": numbers.lhs_spec[1]}
    for name, dim in of_lhs.items():
        if params[name] % (outer * size):
            continue
        dims = zip(eqn.invars, (dim, numbers.rhs_spec[0]), strict=True)
        lhs, rhs = (Layout(dim, outer, shape_of(a)[dim] // (outer * size)) for a, dim in dims)
        if at[0] in (None, lhs) and at[1] in (None, rhs):
            return name, (lhs, rhs)
    return None


def _tile(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = at[0]
    if layout is None or eqn.params["reps"][layout.dim] != 1:
        return None
    return [layout], list(at)


def _window(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    layout = _one(at)
    if layout is None:
        return None
    given = eqn.params
    still = {"window_dimensions": 1, "window_strides": 1, "base_dilation": 1, "window_dilation": 1}
    if any(given[k][layout.dim] != n for k, n in still.items() if given.get(k) is not None):
        return None
    padding = given.get("padding")
    if padding is not None and tuple(padding[layout.dim]) != (0, 0):
        return None
    return _elementwise(eqn, at, size)


def _leading(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    """PRNG keys and what is made of each: their dimensions come first."""
    layout = _one(at)
    if layout is None or not is_by_key(eqn):
        return None
    wants = [layout if len(shape_of(a)) > layout.dim else None for a in eqn.invars]
    return [layout] * len(eqn.outvars), wants


def _matrices(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    """Of matrices, each for itself: their dimensions come last."""
    layout = _one(at)
    if layout is None or any(layout.dim >= len(shape_of(a)) - 2 for a in eqn.invars):
        return None
    return [layout] * len(eqn.outvars), [layout] * len(eqn.invars)


def is_by_key(eqn: JaxprEqn) -> bool:
    """Whether a key's results depend on no other key. Of others than threefry bits do."""
    return eqn.primitive.name != "random_bits" or str(eqn.invars[0].aval.dtype) == "key<fry>"


def _each(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    return list(at), list(at)


def _gather(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    x, indices = at
    operand_batch = tuple(numbers.operand_batching_dims)
    index_batch = tuple(numbers.start_indices_batching_dims)
    rank = len(shape_of(eqn.outvars[0]))
    others = [d for d in range(rank) if d not in numbers.offset_dims]
    if x is None:
        if indices is None or indices.dim >= len(others):
            return None
        want = None
        if indices.dim in index_batch:
            want = indices.at(operand_batch[index_batch.index(indices.dim)])
        return [indices.at(others[indices.dim])], [want, indices]
    if x.dim in operand_batch:
        want = x.at(index_batch[operand_batch.index(x.dim)])
        if indices not in (None, want):
            return None
        return [x.at(others[want.dim])], [x, want]
    taken = {*numbers.collapsed_slice_dims, *numbers.start_index_map, *operand_batch}
    if indices is None and x.dim not in taken and sizes[x.dim] == shape_of(eqn.invars[0])[x.dim]:
        window = [d for d in range(len(sizes)) if d not in {*numbers.collapsed_slice_dims}]
        window = [d for d in window if d not in operand_batch]
        return [x.at(numbers.offset_dims[window.index(x.dim)])], list(at)
    return None


def _scatter(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    numbers = eqn.params["dimension_numbers"]
    x, indices, updates = at
    operand_batch = list(numbers.operand_batching_dims)
    index_batch = list(numbers.scatter_indices_batching_dims)
    shape, update_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    others = [d for d in range(len(update_shape)) if d not in numbers.update_window_dims]
    gone = {*numbers.inserted_window_dims, *operand_batch}
    window = [d for d in range(len(shape)) if d not in gone]
    if updates is None and indices is not None:
        updates = indices.at(others[indices.dim])
    elif updates is None and x is not None and x.dim in operand_batch:
        updates = x.at(others[index_batch[operand_batch.index(x.dim)]])
    elif updates is None and x is not None and x.dim in window:
        updates = x.at(numbers.update_window_dims[window.index(x.dim)])
    if updates is None:
        return None
    if updates.dim in others:  # every sample has its own indices
        index = updates.at(others.index(updates.dim))
        if indices not in (None, index):
            return None
        if index.dim in index_batch:
            want = updates.at(operand_batch[index_batch.index(index.dim)])
            return ([want], [want, index, updates]) if x in (None, want) else None
        adds = eqn.primitive.name in ("scatter-add", "scatter_add", "scatter-sub")
        return ([SUMMED], [None, index, updates]) if adds and x is None else None
    want = updates.at(window[list(numbers.update_window_dims).index(updates.dim)])
    whole = shape[want.dim] == update_shape[updates.dim]
    if indices is not None or x not in (None, want) or not whole:
        return None
    return (
        ([want], [want, None, updates])
        if want.dim not in (numbers.scatter_dims_to_operand_dims)
        else None
    )


def _attention(eqn: JaxprEqn, at: Sequence[Where], size: int) -> Ruled | None:
    """cuDNN's attention (`jax.nn.dot_product_attention`), of each sequence for itself.

    What it drops depends on the position in the batch, and packed sequences and pages are counted
    from the first row.
    """
    layout = _one(at)
    query, bias = eqn.invars[0], eqn.invars[3]
    packed = any(math.prod(shape_of(a)) for a in eqn.invars[6:10])
    if layout is None or layout.dim != 0 or eqn.params["dropout_rate"] or packed:
        return None
    rows = shape_of(query)[0]
    along = lambda atom: math.prod(shape_of(atom)) > 0 and shape_of(atom)[0] == rows
    wants = [layout if along(a) else None for a in eqn.invars]
    if any(own is not None and want is None for own, want in zip(at, wants, strict=True)):
        return None
    has_bias = math.prod(shape_of(bias)) > 0 and not along(bias)
    if has_bias and eqn.params["variadic_args"][1] and shape_of(bias)[0] != 1:
        return None
    return [layout if along(v) else SUMMED for v in eqn.outvars], wants


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
        "reduce_xor".split(),
        _reduce,
    ),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp".split(),
        _along_others(lambda eqn: (eqn.params["axis"],)),
    ),
    **dict.fromkeys(
        "reduce_window_max reduce_window_min reduce_window_sum select_and_scatter_add "
        "select_and_gather_add window_index window_gradient".split(),
        _window,
    ),
    **dict.fromkeys(
        "random_wrap random_unwrap random_bits random_fold_in random_split".split(), _leading
    ),
    **dict.fromkeys(
        "scatter scatter-add scatter_add scatter-sub scatter-mul scatter-min scatter-max".split(),
        _scatter,
    ),
    **dict.fromkeys("cholesky eigh lu qr svd triangular_solve".split(), _matrices),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    cudnn_attention.BACKWARD: _attention,
    cudnn_attention.FORWARD: _attention,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "optimization_barrier": _each,
    "pack_bits": _along_others(lambda eqn: (eqn.params["axis"],)),
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along_others(lambda eqn: eqn.params["dimensions"]),
    "slice": _slice,
    "sort": _along_others(lambda eqn: (eqn.params["dimension"],)),
    "split": _along_others(lambda eqn: (eqn.params["axis"],)),
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "stack": _stack,
    "unpack_bits": _along_others(lambda eqn: (eqn.params["axis"],)),
    "unstack": _unstack,
    "fft": _along_others(lambda eqn: _last(eqn, len(eqn.params["fft_lengths"]))),
    "tile": _tile,
    "top_k": _along_others(lambda eqn: (eqn.params["axis"],)),
    "transpose": _transpose,
}

_SIZED = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
    "window_gradient": "shape",
}
"""The parameter that has the shape of the result."""


def resized_params(
    eqn: JaxprEqn, ins: Sequence[Where], outs: Sequence[Any], size: int
) -> dict[str, Any]:
    """The parameters of `eqn` for a batch of `size`.

    Args:
      ins, outs: how the samples lie in its operands and results.
    """
    params, name = eqn.params, eqn.primitive.name
    layout = outs[0]
    if name in _SIZED and isinstance(layout, Layout):
        sized = _SIZED[name]
        return {**params, sized: layout.shape(tuple(params[sized]), size)}
    if name == "gather" and ins[0] is not None:
        sizes = tuple(params["slice_sizes"])
        whole = sizes[ins[0].dim] == shape_of(eqn.invars[0])[ins[0].dim] != 1
        return {**params, "slice_sizes": ins[0].shape(sizes, size)} if whole else params
    if name == "conv_general_dilated" and isinstance(layout, Layout):
        whole = shape_of(eqn.outvars[0])[layout.dim] // (layout.outer * layout.inner)
        own = _own_groups(eqn, ins, whole)
        return params if own is None else {**params, own[0]: params[own[0]] // whole * size}
    return params
