"""workspace_division: one workspace limit for all convolutions of a network, divided among them (WD).

µ-cuDNN (Oyama et al., CLUSTER 2018), section III-C. Of each kernel only the desirable set counts: the
configurations that are faster than all that need no more workspace. One of each is chosen by the 0-1
program of equations 1 to 4,

    min Σ_k Σ_c T_k(c) x_kc   subject to   Σ_k Σ_c M_k(c) x_kc ≤ M,   Σ_c x_kc = 1,   x_kc ∈ {0, 1}.

The paper grows desirable sets of every smaller batch, each pruned. Here they are read off WR's
passes, since the workspace of a configuration is that of its largest part: the desirable set is WR's
answer for every workspace that a micro-configuration has.

HiGHS solves the program to its tolerances, 1e-6 of a row. Bytes need more: one kernel may want
10 KiB where the limit is 10 GiB, and HiGHS was seen to go some bytes over the limit, or to end 0.9 %
over the fewest seconds. So its answer is a start, and the rest is exact: with a price λ on a byte, no
choice takes fewer seconds than

    Σ_k min_c (T_k(c) + λ M_k(c)) − λ M,

the Lagrangian bound. What alone would lift the bound over the start is out; the few that are left are
tried, kernel by kernel, each time without what another beats in both seconds and bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from vmem_jax.core.convolution import Configuration, Micro
from vmem_jax.errors import WorkspaceError
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.workspace_reuse import improving

Fronts = Sequence[Sequence[Configuration]]
Choice = tuple[Configuration, ...]

_SCALE = 1e4
"""What the largest loss of time and the limit are made in the program: HiGHS's tolerances are
absolute, and SciPy cannot set them."""

_ROUNDING = 1e-12


def front(micros: Iterable[Micro], batch: int) -> Choice:
    """The desirable set: configurations of `batch` samples that nothing beats in seconds and bytes.

    Of ascending workspace, and each faster than the one before. Empty where no sizes that were timed
    make up the batch. O(B · micro-configurations).
    """
    return tuple(improving(micros, batch))


class Timed(Protocol):
    """What has a workspace, in bytes, and takes a time: a configuration, or one of its parts."""

    @property
    def workspace(self) -> int: ...
    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=Timed)


def desirable(candidates: Iterable[T]) -> tuple[T, ...]:
    """Those of `candidates` that are faster than all of no more workspace, by ascending workspace."""
    found: list[T] = []
    for each in sorted(candidates, key=lambda each: (each.workspace, each.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    return tuple(found)


def divide(fronts: Fronts, limit: int) -> Choice:
    """One configuration of each of `fronts`, in the fewest seconds, `limit` bytes for all together.

    Args:
      fronts: the desirable set of each kernel, as `front` gives it; none is empty.
      limit: bytes of the workspaces of all kernels, which are never shared.

    Raises:
      WorkspaceError: not even the smallest workspaces are within the limit.
    """
    smallest = _nbytes(f[0] for f in fronts)
    if smallest > limit:
        raise WorkspaceError(
            what=f"{len(fronts)} convolutions together", limit=limit, least=smallest
        )
    # without what would not fit even if all others took their smallest
    fronts = [[c for c in f if c.workspace - f[0].workspace <= limit - smallest] for f in fronts]
    fastest = tuple(f[-1] for f in fronts)
    if _nbytes(fastest) <= limit:
        return fastest
    price, start = _price(fronts, limit)
    solved = _solve(fronts, limit - smallest)
    if _nbytes(solved) <= limit and _seconds(solved) < _seconds(start):
        start = solved
    return _finish(fronts, limit, price, start) or start


def _price(fronts: Fronts, limit: int) -> tuple[float, Choice]:
    """Seconds a byte, about the lowest with which the cheapest choice fits `limit`; that choice."""
    pairs = [pair for f in fronts for pair in itertools.pairwise(f)]
    slopes = [(a.seconds - b.seconds) / (b.workspace - a.workspace) for a, b in pairs]
    low, high = min(slopes) / 2, max(slopes) * 2  # all take the fastest, all take the smallest
    while high > low * (1 + 1e-9):
        price = math.sqrt(low * high)
        if _nbytes(_cheapest(fronts, price)) > limit:
            low = price
        else:
            high = price
    return high, _cheapest(fronts, high)


def _cheapest(fronts: Fronts, price: float) -> Choice:
    return tuple(min(f, key=lambda c: c.seconds + price * c.workspace) for f in fronts)


def _solve(fronts: Fronts, free: int) -> Choice:
    """HiGHS's choice, of which `free` bytes may lie over the smallest workspaces."""
    # imported here: it takes as long as JAX itself, and most plans do without
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_array

    pairs = [(k, c) for k, f in enumerate(fronts) for c in f]
    # over the fastest and the smallest of the kernel: what all choices have in common says nothing
    losses = [c.seconds - fronts[k][-1].seconds for k, c in pairs]
    extras = [_SCALE * (c.workspace - fronts[k][0].workspace) / free for k, c in pairs]
    columns = [*range(len(pairs)), *range(len(pairs))]
    rows = [k for k, _ in pairs] + [len(fronts)] * len(pairs)
    matrix = csr_array(
        ([1.0] * len(pairs) + extras, (rows, columns)), shape=(len(fronts) + 1, len(pairs))
    )
    low = [1.0] * len(fronts) + [-math.inf]
    high = [1.0] * len(fronts) + [_SCALE]
    found = milp(
        [_SCALE * loss / max(losses) for loss in losses],
        integrality=[1] * len(pairs),
        bounds=(0, 1),
        constraints=LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise RuntimeError(f"HiGHS found no division of the workspace: {found.message}")
    taken = iter(found.x)
    return tuple(max(((next(taken), c) for c in f), key=lambda pair: pair[0])[1] for f in fronts)


def _finish(fronts: Fronts, limit: int, price: float, start: Choice) -> Choice | None:
    """The best choice if it is faster than `start`; None if `start` is, or too many may be."""
    most = _seconds(start) + price * limit
    most += _ROUNDING * most
    best = [min(c.seconds + price * c.workspace for c in f) for f in fronts]
    over = most - sum(best)  # what may be lost against the cheapest in all
    kept = [
        [c for c in f if c.seconds + price * c.workspace - cheapest <= over]
        for f, cheapest in zip(fronts, best, strict=True)
    ]
    # the dearest to decide otherwise first, so that little is lost twice
    second = lambda k: sorted(c.seconds + price * c.workspace for c in kept[k])[1] - best[k]
    order = sorted(range(len(fronts)), key=lambda k: -second(k) if len(kept[k]) > 1 else -math.inf)
    smallest = sum(min(c.workspace for c in f) for f in kept)
    cheapest = sum(best)
    # bytes, seconds and (configuration, the choices before it)
    partial: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for k in order:
        smallest -= min(c.workspace for c in kept[k])
        cheapest -= best[k]
        grown = [
            (w + c.workspace, s + c.seconds, (c, before))
            for w, s, before in partial
            for c in kept[k]
            if w + c.workspace + smallest <= limit
            and s + c.seconds + price * (w + c.workspace) + cheapest <= most
        ]
        grown.sort(key=lambda p: p[:2])
        partial = []
        for p in grown:
            if not partial or p[1] < partial[-1][1]:
                partial.append(p)
        if len(partial) > PARAMS.partial_divisions:
            return None
    if not partial or partial[-1][1] >= _seconds(start):
        return None
    chosen: dict[int, Configuration] = {}
    link = partial[-1][2]
    for k in reversed(order):
        chosen[k], link = link
    return tuple(chosen[k] for k in range(len(fronts)))


def _nbytes(configurations: Iterable[Configuration]) -> int:
    return sum(c.workspace for c in configurations)


def _seconds(configurations: Iterable[Configuration]) -> float:
    return math.fsum(c.seconds for c in configurations)
