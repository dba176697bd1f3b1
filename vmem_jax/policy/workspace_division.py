"""workspace_division: one workspace limit for all convolutions of a network, divided among them (WD).

µ-cuDNN (Oyama et al., CLUSTER 2018), section III-C. Of each kernel only the desirable set counts: the
configurations that are faster than all that need no more workspace. One of each is chosen by the 0-1
program of equations 1 to 4,

    min Σ_k Σ_c T_k(c) x_kc   subject to   Σ_k Σ_c M_k(c) x_kc ≤ M,   Σ_c x_kc = 1,   x_kc ∈ {0, 1}.

The paper grows desirable sets of every smaller batch, each pruned. Here they are read off WR's
passes, since the workspace of a configuration is that of its largest part: the desirable set is WR's
answer for every workspace that a micro-configuration has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vmem_jax.core.convolution import Configuration, Micro
from vmem_jax.errors import WorkspaceError
from vmem_jax.policy.workspace_reuse import improving

_SCALE = 1e4
"""What the largest loss of time and the limit are made in the program: HiGHS's tolerances are
absolute, 1e-6 to 1e-7, and SciPy cannot set them."""


def front(micros: Iterable[Micro], batch: int) -> tuple[Configuration, ...]:
    """The desirable set: configurations of `batch` samples that nothing beats in seconds and bytes.

    Of ascending workspace, and each faster than the one before. Empty where no sizes that were timed
    make up the batch. O(B · micro-configurations).
    """
    return tuple(improving(micros, batch))


def divide(fronts: Sequence[Sequence[Configuration]], limit: int) -> tuple[Configuration, ...]:
    """One configuration of each of `fronts`, in the fewest seconds, `limit` bytes for all together.

    Args:
      fronts: the desirable set of each kernel, as `front` gives it; none is empty.
      limit: bytes of the workspaces of all kernels, which are never shared.

    Raises:
      WorkspaceError: not even the least workspaces are within the limit.
    """
    least = sum(f[0].workspace for f in fronts)
    if least > limit:
        raise WorkspaceError(what=f"{len(fronts)} convolutions together", limit=limit, least=least)
    free = limit - least
    # what would not fit even if all others took their least
    fronts = [[c for c in f if c.workspace - f[0].workspace <= free] for f in fronts]
    fastest = tuple(f[-1] for f in fronts)
    if sum(c.workspace for c in fastest) <= limit:
        return fastest
    forbidden: list[list[tuple[int, int]]] = []
    while True:
        chosen = _solve(fronts, free, forbidden)
        found = tuple(f[c] for f, c in zip(fronts, chosen, strict=True))
        if sum(c.workspace for c in found) <= limit:
            return found
        # Within HiGHS's tolerance of the limit, and yet over it: neither this choice nor one that
        # takes as much for each.
        forbidden.append([(k, c) for k, at in enumerate(chosen) for c in range(at, len(fronts[k]))])


def _solve(
    fronts: Sequence[Sequence[Configuration]], free: int, forbidden: list[list[tuple[int, int]]]
) -> list[int]:
    """Which configuration of each front.

    Args:
      free: bytes that may be taken over the least of each.
      forbidden: groups of (kernel, configuration), each with some of every kernel; not every kernel
        may have one of them.
    """
    # imported here: it takes as long as JAX itself, and most plans do without
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_array

    pairs = [(k, c) for k, f in enumerate(fronts) for c in range(len(f))]
    column = {pair: n for n, pair in enumerate(pairs)}
    # over the fastest and the smallest of the kernel: what all choices have in common says nothing
    losses = [fronts[k][c].seconds - fronts[k][-1].seconds for k, c in pairs]
    extras = [fronts[k][c].workspace - fronts[k][0].workspace for k, c in pairs]
    rows = [[(column[pair], 1.0) for pair in pairs if pair[0] == k] for k in range(len(fronts))]
    rows.append([(n, _SCALE * extra / free) for n, extra in enumerate(extras)])
    rows += [[(column[pair], 1.0) for pair in group] for group in forbidden]
    low = [1.0] * len(fronts) + [float("-inf")] * (1 + len(forbidden))
    high = [1.0] * len(fronts) + [_SCALE] + [len(fronts) - 1.0] * len(forbidden)
    flat = [(r, n, factor) for r, row in enumerate(rows) for n, factor in row]
    r, n, factor = zip(*flat, strict=True)
    matrix = csr_array((factor, (r, n)), shape=(len(rows), len(pairs)))
    found = milp(
        [_SCALE * loss / max(losses) for loss in losses],
        integrality=[1] * len(pairs),
        bounds=(0, 1),
        constraints=LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise RuntimeError(f"HiGHS found no division of the workspace: {found.message}")
    return [
        max(range(len(f)), key=[found.x[column[k, c]] for c in range(len(f))].__getitem__)
        for k, f in enumerate(fronts)
    ]
