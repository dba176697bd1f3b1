"""recompute_chains: how many bytes come back together when neighbours are dropped.

Recomputing a value also recomputes the dropped values that it is made from. So dropped values that
are made from one another, by steps of one phase, come back together as one *stretch*. A kept residual
ends it, and so does a boundary of the loop over sub-batches. The stretches of a phase are the
connected components of a growing graph, held as disjoint sets (Tarjan, "Efficiency of a good but not
linear set union algorithm", JACM 1975, section 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vmem_jax.core.program import Program


class Stretches:
    """The stretches of `program`; nothing is dropped at first.

    Args:
      crosses: for each buffer, whether it is read in another phase than it is made in.
    """

    def __init__(self, program: Program, crosses: Sequence[bool]) -> None:
        count = len(program.buffers)
        self._program = program
        self._dropped = [False] * count
        self._passes = [False] * count  # whether a stretch goes on behind it
        self._parent = list(range(count))
        self._nbytes = [0] * count  # of the dropped values of the set, at its root
        self._earlier: list[list[int]] = [[] for _ in range(count)]  # read by it, of other phases
        for b in range(count):
            if not crosses[b] and not program.is_resident[b]:
                self._join(b)

    def drop(self, b: int) -> None:
        """`b` is dropped from now on."""
        if self._dropped[b]:
            return
        self._dropped[b] = True
        if not self._passes[b]:
            self._join(b)
        self._nbytes[self._root(b)] += self._program.buffers[b].nbytes

    def exceeds(self, b: int, most: float) -> bool:
        """Whether more than `most` bytes come back with `b`, its own among them."""
        total = 0 if self._dropped[b] else self._program.buffers[b].nbytes
        near = [b] if self._passes[b] else [*self._same(b), *self._other(b)]
        stack = list({self._root(v) for v in near if self._passes[v]})
        seen = set(stack)
        while stack and total <= most:
            root = stack.pop()
            total += self._nbytes[root]
            more = {self._root(v) for v in self._earlier[root] if self._passes[v]} - seen
            seen |= more
            stack += more
        return total > most

    def _join(self, b: int) -> None:
        """A stretch goes on behind `b`."""
        self._passes[b] = True
        self._earlier[b] += self._other(b)
        for v in self._same(b):
            if self._passes[v]:
                self._unite(b, v)

    def _unite(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a == b:
            return
        if len(self._earlier[a]) < len(self._earlier[b]):
            a, b = b, a
        self._parent[b] = a
        self._nbytes[a] += self._nbytes[b]
        self._earlier[a] += self._earlier[b]
        self._earlier[b] = []

    def _root(self, b: int) -> int:
        parent = self._parent
        while parent[b] != b:
            parent[b] = b = parent[parent[b]]
        return b

    def _phase(self, b: int) -> object:
        return self._program.steps[self._program.producer[b]].phase

    def _same(self, b: int) -> Iterator[int]:
        """What `b` is made from, and what is made from it, in its own phase."""
        program, phase = self._program, self._phase(b)
        yield from (r for r in self._read(b) if self._phase(r) is phase)
        for s in program.readers[b]:
            if program.steps[s].phase is phase and not program.steps[s].is_boundary:
                yield from (w for w in program.steps[s].writes if not program.is_resident[w])

    def _other(self, b: int) -> Iterator[int]:
        """What `b` is made from, of other phases."""
        phase = self._phase(b)
        return (r for r in self._read(b) if self._phase(r) is not phase)

    def _read(self, b: int) -> list[int]:
        program = self._program
        s = program.producer[b]
        if s < 0 or program.steps[s].is_boundary:
            return []
        return [r for r in program.steps[s].reads if not program.is_resident[r]]
