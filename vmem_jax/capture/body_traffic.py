"""body_traffic: what an iteration of a loop copies between what it makes or reads and where that
lies, and which kernels that takes.

XLA copies into a stack, and to where it is carried, what a library or a kernel that normalises rows
made, and what the iteration reads, too; a fused kernel writes any other result there, and a product
what it adds to that. It copies out of a stack what a library reads, or a barrier; fused kernels read
slices where they lie.

What fused kernels alone make and read each of them computes for itself, and so does the one that
writes it into a stack: as many bytes are moved as by a copy, and no kernel is launched beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from vmem_jax.core.program import Program, Step


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Of one iteration.

    Attributes:
      moved: bytes that are copied.
      copies: kernels beside those of the steps, on a GPU.
      fetches: kernels that read slices of stacks. What an iteration makes is still in a GPU's cache;
        slices are not.
    """

    moved: int = 0
    copies: int = 0
    fetches: int = 0


@dataclasses.dataclass(frozen=True)
class Ends:
    """The buffers of one iteration that a loop hands on.

    Attributes:
      before: what is carried into it.
      slices: what it reads of stacks.
      carried: what it carries into the next one.
      stacked: what it makes, or has, for stacks.
    """

    before: Sequence[int]
    slices: Sequence[int]
    carried: Sequence[int]
    stacked: Sequence[int]


def traffic(program: Program, ends: Ends, libraries: Collection[str]) -> Traffic:
    """Of the iteration `program`.

    Args:
      libraries: the operations that a library computes.
    """
    made, given = set[int](), set[int]()
    for step in program.steps:
        if step.op in libraries:
            there = {w for r, w in step.in_place if r in ends.before}
            made.update(w for w in step.writes if w not in there)
            given.update(step.reads)
        elif step.normalises:
            made.update(step.writes)
        elif step.op == "optimization_barrier":
            made.update(w for r, w in zip(step.reads, step.writes, strict=False) if r in made)
            given.update(step.reads)
    apart = {*made, *ends.carried}
    out_of_stacks = [b for b in ends.slices if b in given]
    moved = [*out_of_stacks, *(b for b in ends.carried if b in made)]
    moved += [b for b in ends.stacked if b in apart or program.readers[b]]
    is_fused = lambda b: all(program.steps[s].fusible for s in program.readers[b])
    written = {b for b in ends.stacked if is_fused(b) and b not in {*apart, *program.inputs}}
    fetching = [s for s in program.steps if s.fusible and s.launched]
    return Traffic(
        moved=sum(program.buffers[b].nbytes for b in moved),
        copies=sum(b not in written for b in moved) + sum(_more(program.steps, written)),
        fetches=len(out_of_stacks) + sum(not {*ends.slices}.isdisjoint(s.reads) for s in fetching),
    )


def _more(steps: Sequence[Step], written: Collection[int]) -> Iterator[int]:
    """Of each step the kernels beside its own: one that writes into a stack writes nothing else."""
    for step in steps:
        there = sum(b in written for b in step.writes)
        yield max(0, there - (there == len(step.writes)))
