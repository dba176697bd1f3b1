"""neighbours: which steps XLA may make one kernel of, and that are therefore timed together.

A heavy step is a library call, and what follows it up to the next one is elementwise work and
reductions over the same values: XLA fuses what reads the same operands, writes several results from
one kernel, and hands a bias or a clamp to the library as an epilogue. The sum of such steps alone is
up to a half more than they take together.
"""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax.core.program import Program

_MOST = 64
"""Steps timed together. Compiling a program of many copies of more takes too long."""


def neighbours(
    program: Program, order: Sequence[int], apart: frozenset[int] = frozenset()
) -> tuple[tuple[int, ...], ...]:
    """The steps of `order`, cut before every heavy step; where nothing follows one, it is left out.

    Args:
      apart: steps that belong to no neighbours: they run inside their readers, or cannot be timed.
    """
    found: list[list[int]] = [[]]
    for s in order:
        heavy = not program.steps[s].fusible
        if s in apart:
            if heavy:
                found.append([])
            continue
        if heavy or len(found[-1]) == _MOST:
            found.append([])
        found[-1].append(s)
    return tuple(tuple(g) for g in found if any(program.steps[s].fusible for s in g))
