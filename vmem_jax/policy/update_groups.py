"""update_groups: the steps that update one weight stand together, as soon as its gradient exists.

An optimiser writes several values from one gradient: moments, and the weight itself. XLA computes
them in one kernel, which reads the gradient and each moment once, unless a fence stands between
them; and the gradient dies with the last of them. They stand where everything is there that one of
them reads, behind the last read of the old weight, and behind the steps that read a cast of it: where
it is written over, the cast cannot be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vmem_jax.core.program import Phase, Program
from vmem_jax.policy.params import PARAMS


def update_ranks(program: Program, order: Sequence[int]) -> list[float]:
    """A rank of each step: its position in `order`, but for those of an update, which follow the last
    step that they need, with the scalars that only they wait for in front of them."""
    rank = [0.0] * len(program.steps)
    for position, s in enumerate(order):
        rank[s] = float(position)
    for group in _groups(program):
        scalars, latest = set(), -1.0
        stack = [s for member in group for s in _ahead(program, member)]
        seen = set(group)
        while stack:
            s = stack.pop()
            if s in seen:
                continue
            seen.add(s)
            if program.steps[s].pure and program.steps[s].nbytes < PARAMS.scalar_nbytes:
                scalars.add(s)
                stack += _producers(program, s)
            else:
                latest = max(latest, rank[s])
        for s in scalars:
            rank[s] = min(rank[s], latest + 0.25)
        for s in group:
            rank[s] = latest + 0.5
    return rank


def _producers(program: Program, s: int) -> Iterator[int]:
    yield from (m for b in program.steps[s].reads if (m := program.producer[b]) >= 0)


def _ahead(program: Program, s: int) -> Iterator[int]:
    """What must run before update step `s`, or is better off there."""
    yield from _producers(program, s)
    for i in program.steps[s].reads:
        if program.overwritten_by.get(i) != s:
            continue
        for reader in program.readers[i]:
            yield reader
            step = program.steps[reader]
            if step.fusible and step.pure and step.phase is not Phase.UPDATE:
                yield from (r for w in step.writes for r in program.readers[w])


def _groups(program: Program) -> list[list[int]]:
    """The steps of each update, in traced order: those that read one gradient, or what another of
    them writes. Updates of one step are left out."""
    updates = {
        s
        for s, step in enumerate(program.steps)
        if step.phase is Phase.UPDATE
        and step.fusible
        and step.pure
        and step.nbytes >= PARAMS.scalar_nbytes
        if any(program.is_resident[w] for w in step.writes)
    }
    leader = {s: s for s in updates}

    def first(s: int) -> int:
        while leader[s] != s:
            leader[s] = leader[leader[s]]
            s = leader[s]
        return s

    for b, buffer in enumerate(program.buffers):
        made = program.producer[b]
        if made < 0 or buffer.nbytes < PARAMS.scalar_nbytes:
            continue
        together = [s for s in (made, *program.readers[b]) if s in updates]
        for s in together[1:]:
            low, high = sorted((first(together[0]), first(s)))
            leader[high] = low
    found: dict[int, list[int]] = {}
    for s in sorted(updates):
        found.setdefault(first(s), []).append(s)
    return [group for group in found.values() if len(group) > 1]
