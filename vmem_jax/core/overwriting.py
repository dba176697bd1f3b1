"""overwriting: donated arguments are read for the last time before their update writes over them.

XLA orders by data dependence alone. An update that may run before another reader of the old argument
makes XLA copy that argument: all layers of a stacked weight for one of them. Mostly the gradient of
the update depends on every reader. It does not on a cast that is computed again for the product
behind that gradient. There a barrier in front of the update holds the argument together with what
was computed from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vmem_jax.core.program import Program
from vmem_jax.core.spines import is_read_from


def readers_before_updates(
    program: Program,
    order: Sequence[int],
    uses: Mapping[int, Sequence[tuple[int, bool]]],
    fences: Mapping[int, Sequence[int]],
    small: int,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(position of an update, what a barrier in front of it holds), where one is needed.

    Args:
      uses: as `spines.uses_of` has them.
      fences: position -> what a barrier holds there already.
      small: arguments up to this many bytes may be copied.
    """
    overwritten = {
        i: s for i, s in program.overwritten_by.items() if program.buffers[i].nbytes > small
    }
    if not overwritten:
        return
    behind: dict[int, int] = {}  # buffer -> the repeated steps that its version depends on, as bits
    read: dict[int, int] = {}  # argument -> the repeated steps that have read it so far
    ran: set[int] = set()
    for position, s in enumerate(order):
        _tie(behind, fences.get(position, ()))
        step = program.steps[s]
        for i in (i for i in step.reads if overwritten.get(i) == s):
            missing = read.get(i, 0) & ~_together(behind, step.reads)
            live = [b for b, bits in behind.items() if bits & missing]
            live = [b for b in live if is_read_from(uses[b], position) and b != i]
            held = [i]
            for b in sorted(live, key=lambda b: program.buffers[b].nbytes):
                if missing & behind[b]:
                    held.append(b)
                    missing &= ~behind[b]
            if len(held) > 1:
                _tie(behind, held)
                yield position, tuple(held)
        own = _together(behind, step.reads)
        if s in ran and not overwritten.keys().isdisjoint(step.reads):
            own |= 1 << position
            read.update((i, read.get(i, 0) | 1 << position) for i in step.reads)
        behind.update(dict.fromkeys(step.writes, own))
        ran.add(s)


def _together(behind: Mapping[int, int], buffers: Sequence[int]) -> int:
    found = 0
    for b in buffers:
        found |= behind.get(b, 0)
    return found


def _tie(behind: dict[int, int], held: Sequence[int]) -> None:
    """A barrier over `held`: each depends on all that any of them depends on."""
    if held:
        behind.update(dict.fromkeys(held, _together(behind, held)))
