"""shard_rules: how an operation splits its results over devices, from how its operands are split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from vmem_jax.capture.primitives import nbytes
from vmem_jax.jax_compat import Atom, JaxprEqn

Split = tuple[tuple[str, ...], ...]
"""For every dimension the mesh axes that split it."""

WHOLE: Split = ()


def aligned(aval: Any, atoms: Sequence[Atom], splits: Sequence[Split]) -> Split:
    """The split by what stands in the same place: dimensions of the same rank and size."""
    shape = getattr(aval, "shape", ())
    found: list[tuple[str, ...]] = [()] * len(shape)
    for atom, split in zip(atoms, splits, strict=True):
        other = getattr(atom.aval, "shape", ())
        if len(other) == len(shape):
            for d in range(min(len(shape), len(split))):
                if split[d] and not found[d] and other[d] == shape[d]:
                    found[d] = split[d]
    return each_once(found)


def each_once(split: Sequence[tuple[str, ...]]) -> Split:
    """Each axis splits one dimension only: the first that has it."""
    seen: set[str] = set()
    result = []
    for axes in split:
        kept = tuple(a for a in axes if a not in seen)
        seen.update(kept)
        result.append(kept)
    return tuple(result)


def rank_of(atom: Atom) -> int:
    return len(getattr(atom.aval, "shape", ()))


def axes_at(split: Split, d: int) -> tuple[str, ...]:
    return split[d] if d < len(split) else ()


def contracted_dims(eqn: JaxprEqn) -> tuple[tuple[int, ...], ...]:
    """The dimensions of each operand of a product that its result has not."""
    if eqn.primitive.name == "dot_general":
        contract, _ = eqn.params["dimension_numbers"]
        return tuple(map(tuple, contract))
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        return tuple(spec[1:] for spec in (numbers.lhs_spec, numbers.rhs_spec))
    return ()


def origins(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Of each dimension of the result of a matrix product the operand that it is from, 0 or 1, and
    its dimension there; -1 of a batch dimension, which both have. Empty for a convolution."""
    if eqn.primitive.name != "dot_general":
        return []
    contract, batch = eqn.params["dimension_numbers"]
    found = [(-1, d) for d in range(len(batch[0]))]
    for side in range(2):
        here = (*contract[side], *batch[side])
        found += [(side, d) for d in range(rank_of(eqn.invars[side])) if d not in here]
    return found


def _dot(eqn: JaxprEqn, splits: list[Split], _: Any) -> list[Split]:
    """Where both operands would split a dimension of their own by one axis, the larger one does, and
    the smaller one is gathered."""
    _, batch = eqn.params["dimension_numbers"]
    size = [nbytes(a.aval) for a in eqn.invars]
    found = []
    for side, d in origins(eqn):
        if side < 0:
            found.append(axes_at(splits[0], batch[0][d]) or axes_at(splits[1], batch[1][d]))
        else:
            found.append(axes_at(splits[side], d))
    of = [side for side, _ in origins(eqn)]
    first = sorted(range(len(of)), key=lambda r: -1 if of[r] < 0 else of[r] != (size[1] > size[0]))
    ordered = each_once([found[r] for r in first])
    return [tuple(ordered[first.index(r)] for r in range(len(found)))]


def _conv(eqn: JaxprEqn, splits: list[Split], _: Any) -> list[Split]:
    numbers = eqn.params["dimension_numbers"]
    found: list[tuple[str, ...]] = [()] * len(numbers.out_spec)
    found[numbers.out_spec[0]] = axes_at(splits[0], numbers.lhs_spec[0])
    found[numbers.out_spec[1]] = axes_at(splits[1], numbers.rhs_spec[0])
    return [each_once(found)]


def _broadcast(eqn: JaxprEqn, splits: list[Split], _: Any) -> list[Split]:
    shape = eqn.outvars[0].aval.shape
    found: list[tuple[str, ...]] = [()] * len(shape)
    for d, out in enumerate(eqn.params["broadcast_dimensions"]):
        if eqn.invars[0].aval.shape[d] == shape[out]:
            found[out] = axes_at(splits[0], d)
    return [each_once(found)]


def _transpose(eqn: JaxprEqn, splits: list[Split], _: Any) -> list[Split]:
    return [tuple(axes_at(splits[0], d) for d in eqn.params["permutation"])]


def _reduce(eqn: JaxprEqn, splits: list[Split], _: Any) -> list[Split]:
    rank = len(eqn.invars[0].aval.shape)
    kept = tuple(axes_at(splits[0], d) for d in range(rank) if d not in eqn.params["axes"])
    return [kept for _ in eqn.outvars]


def _reshape(eqn: JaxprEqn, splits: list[Split], sizes: dict[str, int]) -> list[Split]:
    """A split dimension stays split where it leads the dimensions that it becomes or joins."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    leads = {}  # elements of the dimensions in front -> dimension, of the result
    for e in range(len(after)):
        if after[e] > 1:
            leads[math.prod(after[:e])] = e
    found: list[tuple[str, ...]] = [()] * len(after)
    for d in range(len(before)):
        axes, out = axes_at(splits[0], d), leads.get(math.prod(before[:d]))
        if axes and out is not None and after[out] % math.prod(sizes[a] for a in axes) == 0:
            found[out] = axes
    return [each_once(found)]


def _unstack(eqn: JaxprEqn, splits: list[Split], _: Any) -> list[Split]:
    at = eqn.params["axis"]
    kept = tuple(axes_at(splits[0], d) for d in range(rank_of(eqn.invars[0])) if d != at)
    return [kept for _ in eqn.outvars]


def _stack(eqn: JaxprEqn, splits: list[Split], _: Any) -> list[Split]:
    at, rank = eqn.params["axis"], rank_of(eqn.outvars[0])
    parts = [[axes_at(split, d) for d in range(rank - 1)] for split in splits]
    found = [next(filter(None, axes), ()) for axes in zip(*parts, strict=True)]
    return [each_once([*found[:at], (), *found[at:]])]


def _gather(eqn: JaxprEqn, splits: list[Split], _: Any) -> list[Split]:
    numbers = eqn.params["dimension_numbers"]
    rank = len(eqn.outvars[0].aval.shape)
    batch = [d for d in range(rank) if d not in numbers.offset_dims]
    found: list[tuple[str, ...]] = [()] * rank
    for index, d in enumerate(batch):
        found[d] = axes_at(splits[1], index)
    return [each_once(found)]


def _first(eqn: JaxprEqn, splits: list[Split], _: Any) -> list[Split]:
    return [splits[0] for _ in eqn.outvars]


Rule = Callable[[JaxprEqn, list[Split], dict[str, int]], list[Split]]

RULES: dict[str, Rule] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "unstack": _unstack,
    "stack": _stack,
    "gather": _gather,
    "scatter": _first,
    "scatter-add": _first,
    **dict.fromkeys(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
        "reduce_xor".split(),
        _reduce,
    ),
}
