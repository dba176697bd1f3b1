"""workspace_reuse: the fastest configuration of one convolution within a limit of workspace (WR).

µ-cuDNN (Oyama et al., CLUSTER 2018), section III-B: a batch of b samples takes

    T(b) = min over micro-batches m ≤ b of Tμ(m) + T(b − m),   T(0) = 0,

where Tμ(m) is the fastest micro-configuration of m samples within the limit. They run one after the
other in one workspace. This is an unbounded knapsack that has to be full, so micro-configurations
may be put in one at a time, each in one pass over b = 1, …, B. In ascending order of workspace, T(B)
after each is the best under a limit of as many bytes: the same passes give WD's desirable sets.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator

from vmem_jax.core.convolution import Configuration, Convolution, Micro
from vmem_jax.errors import WorkspaceError


class BatchSizes(enum.StrEnum):
    """Which sizes of micro-batches are measured; as µ-cuDNN names them (section III-D)."""

    ALL = "all"
    POWER_OF_TWO = "powerOfTwo"
    UNDIVIDED = "undivided"


def batch_sizes(batch: int, policy: BatchSizes) -> tuple[int, ...]:
    """The micro-batches of a batch that `policy` has measured, largest first; the whole is one."""
    if policy is BatchSizes.ALL:
        return tuple(range(batch, 0, -1))
    if policy is BatchSizes.UNDIVIDED:
        return (batch,)
    powers = {1 << n for n in range(batch.bit_length())}
    return tuple(sorted({batch, *powers}, reverse=True))


def reuse(
    convolution: Convolution, micros: Iterable[Micro], limit: int | None = None
) -> Configuration:
    """The fastest configuration of `convolution` whose workspace is within `limit` bytes.

    O(B · distinct sizes), as only the fastest of each size within the limit counts.

    Args:
      micros: of any sizes; those that were not timed do not count.
      limit: None for no limit.

    Raises:
      WorkspaceError: nothing that was timed is within the limit, or makes up the batch.
    """
    micros = list(micros)
    fastest: dict[int, Micro] = {}
    for m in micros:
        known = fastest.get(m.batch)
        better = known is None or (m.seconds, m.workspace) < (known.seconds, known.workspace)
        if _is_timed(m) and (limit is None or m.workspace <= limit) and better:
            fastest[m.batch] = m
    if found := tuple(improving(fastest.values(), convolution.batch)):
        return found[-1]
    smallest = next((c.workspace for c in improving(micros, convolution.batch)), None)
    raise WorkspaceError(what=str(convolution), limit=limit, least=smallest)


def improving(micros: Iterable[Micro], batch: int) -> Iterator[Configuration]:
    """Configurations of `batch` samples: the one of the smallest workspace, then ever faster ones.

    Each is the fastest that its workspace allows, the last one the fastest of all. Of two that take
    as long, it is the one of the smaller workspace. What was not timed does not count.
    """
    seconds = [0.0] + [math.inf] * batch
    last: list[Micro | None] = [None] * (batch + 1)  # of the best configuration of so many samples
    fastest = math.inf
    # of the same workspace the larger first, so that ties are in few parts
    usable = [m for m in micros if _is_timed(m) and m.batch <= batch]
    usable.sort(key=lambda m: (m.workspace, -m.batch, m.seconds))
    for _, group in itertools.groupby(usable, key=lambda m: m.workspace):
        for m in group:
            if seconds[m.batch] <= m.seconds:
                continue  # what needs no more memory does as much in no more time
            for b in range(m.batch, batch + 1):
                if m.seconds + seconds[b - m.batch] < seconds[b]:
                    seconds[b], last[b] = m.seconds + seconds[b - m.batch], m
        if seconds[batch] < fastest:
            found = _trace_back(last, batch)
            if found.seconds < fastest:  # summed in another order, it may not be
                fastest = found.seconds
                yield found


def _trace_back(last: list[Micro | None], batch: int) -> Configuration:
    """The configuration of `batch` samples, largest micro-batches first."""
    parts: list[Micro] = []
    while batch:
        micro = last[batch]
        assert micro is not None, "what has finite seconds has parts"
        parts.append(micro)
        batch -= micro.batch
    return Configuration(tuple(sorted(parts, key=lambda m: -m.batch)))


def _is_timed(micro: Micro) -> bool:
    return not math.isnan(micro.seconds)
