"""standard: the usual checkpoint policies, as idle intervals of a program to recompute across.

By hand one wraps each block of a network in `jax.checkpoint`, and saves nothing in it, or the results
of its matrix products (`dots_saveable`), or of those without batch dimensions
(`dots_with_no_batch_dims_saveable`); or only the inputs of every k-th block, √n of n at best (Chen et
al., "Training deep nets with sublinear memory cost", 2016, section 4.1). Each is a choice that a
planner should not lose to.

Blocks lie between *cuts*: values through which all goes that the forward pass computes, the residual
stream behind each part of a layer. What lies behind the last kept cut is read by the backward pass at
once, and is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from vmem_jax.core.program import Phase, Program
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.recomputation import Drop, Recomputation


@dataclasses.dataclass(frozen=True)
class Standard:
    """One such choice.

    Attributes:
      name: for people, "dots".
      drops: the idle intervals to recompute across.
    """

    name: str
    drops: frozenset[Drop]


def standard_choices(recomputation: Recomputation) -> tuple[Standard, ...]:
    """The usual choices for a program, each once; none where its forward pass has no two cuts."""
    program, base = recomputation.program, recomputation.base
    found = cuts(program, base)
    if len(found) < 2:
        return ()
    products = lambda batched: {
        w
        for step in program.steps
        if step.op == "dot_general" and (batched or not step.batched)
        for w in step.writes
    }
    choices = {
        "dots": _drops(recomputation, found, products(batched=True)),
        "dots without batch dimensions": _drops(recomputation, found, products(batched=False)),
    }
    for k, offset in _every(len(found)):
        kept = found[offset::k]
        if len(kept) > 1 or k == 1:
            choices[f"every {k}th block from {offset}"] = _drops(recomputation, kept)
    distinct = {drops: name for name, drops in reversed(choices.items()) if drops}
    return tuple(Standard(name, drops) for drops, name in reversed(distinct.items()))


def _every(count: int) -> Iterator[tuple[int, int]]:
    """(k, offset): which of so many cuts are kept."""
    powers = [2**n for n in range(count.bit_length()) if 2**n < count]
    for k in sorted({*powers, 3, round(math.sqrt(count)), round(math.sqrt(2 * count))}):
        for offset in range(k if k <= PARAMS.cut_offsets else 1):
            yield k, offset


def cuts(program: Program, base: Sequence[int]) -> list[int]:
    """The values through which the forward pass goes, in the order of their making.

    Those are alone, of all that products made or led to, where they are read later: at some position
    of `base` no other one that the forward pass reads later is there.
    """
    forward = [s for s in base if program.steps[s].phase is Phase.FORWARD]
    rank = {s: p for p, s in enumerate(forward)}
    led: set[int] = set()  # to which a product led
    last: dict[int, int] = {}
    made: list[list[int]] = []
    sizes = []
    for s in forward:
        step = program.steps[s]
        leads = step.is_heavy or any(b in led for b in step.reads)
        led.update(step.writes if leads else ())
        made.append([])
        for w in step.writes:
            reads = [rank[r] for r in program.readers[w] if r in rank]
            if leads and reads:
                last[w] = max(reads)
                made[-1].append(w)
                if step.is_heavy and step.flops:
                    sizes.append(program.buffers[w].nbytes)
    if not sizes:
        return []
    small = PARAMS.small_cut * sorted(sizes)[len(sizes) // 2]
    found: dict[int, None] = {}
    live: set[int] = set()
    for position, writes in enumerate(made):
        live = {b for b in live if last[b] > position}
        live |= {w for w in writes if last[w] > position and program.buffers[w].nbytes >= small}
        if len(live) == 1:
            found.update(dict.fromkeys(live))
    return list(found)


def _drops(
    recomputation: Recomputation, kept: Sequence[int], saved: Collection[int] = ()
) -> frozenset[Drop]:
    """Everything from the first to the last of the cuts `kept` that the backward pass reads, but for
    these, and for `saved`."""
    program, base, uses = recomputation.program, recomputation.base, recomputation.uses
    position = {s: p for p, s in enumerate(base)}
    end = position[program.producer[kept[-1]]]
    keeps = {*kept, *saved}
    found = set()
    for b, positions in enumerate(uses):
        made = program.producer[b]
        if made < 0 or program.is_resident[b] or b in keeps or position[made] > end:
            continue
        for n, (use, following) in enumerate(itertools.pairwise(positions)):
            crosses = program.steps[base[use]].phase is Phase.FORWARD
            crosses = crosses and program.steps[base[following]].phase is not Phase.FORWARD
            if crosses and recomputation.may_drop(b, following):
                found.add((b, n))
    return frozenset(found)
