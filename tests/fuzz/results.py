"""Whether two results of one program agree, within what rounding can do to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .programs import Program

_ROUNDINGS = 4
"""Units of roundoff that each operation on the way may add where its sums are ordered anew: dot
products of up to 128 terms, of which the errors grow as the square root."""

_SPREAD = 2
"""As many times the largest change in runs that round at random, of which a few are made."""

_ERRORS = 4
"""As many times plain's own error against double precision."""

EXACT, CLOSE, CHAOTIC, WRONG = "exact", "close", "chaotic", "wrong"


def compare(
    program: Program,
    expected: Any,
    got: Any,
    reference: Callable[[], Any],
    rounded: Callable[[], Sequence[Any]],
) -> tuple[str, str]:
    """How `got` agrees with `expected`, and what differs most.

    "exact": bit for bit. "close": each array within `_ROUNDINGS` units of roundoff for each operation
    on the way, of its largest element. "chaotic": farther off, but about as near to the results in
    double precision as plain jit's; or no farther from those of the program as it is written than
    random rounding takes them. Else "wrong". A program that divides rounding noise by itself, sorts
    what is nearly equal, or casts to integers what is nearly one, is thereby not called wrong, and
    one whose sums are merely ordered anew needs no second run.

    Args:
      expected: plain jit's results.
      reference: makes the results in double precision; called only where it decides.
      rounded: makes the results of each operation done alone, and then those of runs that round at
        random (`rounding.runs`); called only where it decides.
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
    exact = _arrays(reference())
    errors = [distance(e, a) for e, a in zip(exact, want, strict=True)]
    own = [distance(e, b) for e, b in zip(exact, have, strict=True)]
    # where XLA itself breaks a program, as max(x) == x of an x that it computes twice, plain's
    # error is infinite, and excuses nothing
    as_plain = lambda i: math.isfinite(errors[i]) and own[i] <= limits[i] + _ERRORS * errors[i]
    if not (left := [i for i in left if not as_plain(i)]):
        return CHAOTIC, ""
    written, *runs = map(_arrays, rounded())
    apart = [distance(w, b) for w, b in zip(written, have, strict=True)]
    spreads = [_spread(w, [run[i] for run in runs]) for i, w in enumerate(written)]
    limits = [tolerance * _size(w) + _SPREAD * s for w, s in zip(written, spreads, strict=True)]
    if not (left := [i for i in left if not apart[i] <= limits[i]]):
        return CHAOTIC, ""
    i = max(left, key=lambda i: apart[i] / limits[i] if limits[i] else np.inf)
    return WRONG, (
        f"{names[i]} {want[i].dtype}{want[i].shape}: off by {off[i]:.3g} of {_size(want[i]):.3g}, "
        f"by {apart[i]:.3g} from each operation alone, spread {spreads[i]:.3g}, "
        f"error {own[i]:.3g}, plain's {errors[i]:.3g}"
    )


def _spread(written: np.ndarray, runs: Sequence[np.ndarray]) -> float:
    """The largest change in `runs`, but for those that left the numbers."""
    changes = [distance(written, run) for run in runs]
    return max(filter(math.isfinite, changes), default=0.0)


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
