"""Whether two results of one program agree, within what rounding can do to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .programs import Program

_ROUNDINGS = 4
"""Units of roundoff that each operation on the way may add where its sums are ordered anew: dot
products of up to 128 terms, of which the errors grow as the square root."""

_SPREAD = 8
"""As many times the largest change in `_RUNS` runs with perturbed arguments: these perturb the
arguments alone, while a program that is fused otherwise rounds every value on the way once more or
less."""

_RUNS = 6

_ERRORS = 4
"""As many times plain's own error against double precision."""

EXACT, CLOSE, CHAOTIC, WRONG = "exact", "close", "chaotic", "wrong"


def compare(
    program: Program,
    plain: Callable[..., Any],
    expected: Any,
    got: Any,
    reference: Callable[[], Any],
) -> tuple[str, str]:
    """How `got` agrees with `expected`, and what differs most.

    "exact": bit for bit. "close": each array within `_ROUNDINGS` units of roundoff for each operation
    on the way, of its largest element. "chaotic": farther off, but no farther than plain jit's
    results are where its arguments are perturbed by two units of roundoff; or about as near to the
    results in double precision as plain jit's. Else "wrong". A program that divides rounding noise
    by itself, or sorts what is nearly equal, is thereby not called wrong, and one whose sums are
    merely ordered anew needs no second run.

    Args:
      plain: the compiled step, for the perturbed arguments.
      expected: its results.
      reference: makes the results in double precision; called only where it decides.
    """
    trees = jax.tree.structure(expected), jax.tree.structure(got)
    if trees[0] != trees[1]:
        return WRONG, f"trees {trees[0]} and {trees[1]}"
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(expected)[0]]
    want, have = _arrays(expected), _arrays(got)
    for name, a, b in zip(names, want, have, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return WRONG, f"{name}: {a.dtype}{a.shape} and {b.dtype}{b.shape}"
    if all(_same_bits(a, b) for a, b in zip(want, have, strict=True)):
        return EXACT, ""
    tolerance = _ROUNDINGS * program.roundoff * program.depth
    limits = [tolerance * _size(a) for a in want]
    off = [distance(a, b) for a, b in zip(want, have, strict=True)]
    if not (left := _beyond(off, limits)):
        return CLOSE, ""
    spreads = [0.0] * len(want)
    for seed in range(_RUNS):
        moved = _arrays(plain(*program.fresh(_perturbed(program, seed))))
        spreads = [max(s, distance(a, b)) for s, a, b in zip(spreads, want, moved, strict=True)]
    left = [i for i in left if not off[i] <= limits[i] + _SPREAD * spreads[i]]
    if left:
        exact = _arrays(reference())
        errors = [distance(e, a) for e, a in zip(exact, want, strict=True)]
        own = [distance(e, b) for e, b in zip(exact, have, strict=True)]
        left = [i for i in left if not own[i] <= limits[i] + _ERRORS * errors[i]]
    if not left:
        return CHAOTIC, ""
    i = max(left, key=lambda i: off[i] / limits[i] if limits[i] else np.inf)
    return WRONG, (
        f"{names[i]} {want[i].dtype}{want[i].shape}: off by {off[i]:.3g} of {_size(want[i]):.3g}, "
        f"limit {limits[i]:.3g}, spread {spreads[i]:.3g}, error {own[i]:.3g}, plain's {errors[i]:.3g}"
    )


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two arrays; infinite where NaN or infinities are elsewhere."""
    a, b = _wide(a), _wide(b)
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0))


def _beyond(off: Sequence[float], limits: Sequence[float]) -> list[int]:
    return [i for i, (o, limit) in enumerate(zip(off, limits, strict=True)) if not o <= limit]


def _arrays(tree: Any) -> list[np.ndarray]:
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(raw(x)) for x in jax.tree.leaves(tree)]


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    same = a.tobytes() == b.tobytes()
    return same or (
        a.dtype.kind in "fcV" and bool(np.array_equal(_wide(a), _wide(b), equal_nan=True))
    )


def _wide(a: np.ndarray) -> np.ndarray:
    if a.dtype == jax.dtypes.float0:  # gradients of integers, which have no bytes
        return np.zeros(a.shape)
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _size(a: np.ndarray) -> float:
    magnitudes = np.abs(_wide(a))
    return float(np.max(np.where(np.isfinite(magnitudes), magnitudes, 0), initial=0.0))


def _perturbed(program: Program, seed: int) -> tuple[Any, ...]:
    """The arguments, each number changed by about two units of roundoff of itself."""
    rng = np.random.default_rng(seed)

    def change(a: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        # two units at a time, or most would round back to themselves
        factor = 1 + 2 * program.roundoff * rng.standard_normal(a.shape)
        return (a.astype(np.float64) * factor).astype(a.dtype)

    *rest, key = program.args
    return (*jax.tree.map(change, tuple(rest)), key)
