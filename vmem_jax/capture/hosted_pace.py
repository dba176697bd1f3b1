"""hosted_pace: when slices of state come and go within an iteration of a backward loop.

Left alone, XLA:GPU computes all weight gradients and updates at the end of an iteration, fetches each
slice in front of its update, and nothing hides a copy (0.11.2). Here each update follows the gradient
that it waits for. A barrier over the two, the slices and what the next product reads has that
gradient computed and those slices there before the next product; XLA begins to fetch them several
products earlier. The barrier of the update after the next holds the new slices' stacks, too, so that
they have left by then.

Slices come one after another: in the order in which their updates wait for them, and each is there an
update earlier than it is read. XLA begins to fetch one as late as that copy alone may begin; the
others beside it, and those that leave, make it take longer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.def_use import before_barriers, readers
from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import Atom, JaxprEqn, Literal, Var

_LATER = 2
"""So many updates later what one writes must have left."""

_AHEAD = 1
"""So many updates earlier the slices of one must be there. With none a scanned decoder of 7 billion
weights with its moments in host memory takes 2.85 s, with one 2.75 (H200, 0.11.2)."""


def paced(
    eqns: Sequence[JaxprEqn], results: Sequence[Atom], stacks: Collection[Var]
) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of a body and its results, with updates behind their gradients.

    Args:
      stacks: what it carries that lies in host memory.
    """
    body = _Body(eqns, stacks)
    if not body.tied:
        return [*eqns], [*results]
    return body.emit(), [body.read(a) for a in results]


class _Body:
    """The equations of a body, and where those go that wait for a gradient.

    Attributes:
      tied: barriers over gradients and slices of state, by their indices.
      moved: these, what cuts such slices, and all that follows from them: behind which of the other
        equations each comes; −1 for none.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], stacks: Collection[Var]) -> None:
        self.eqns, self.stacks = eqns, stacks
        self.origin = before_barriers(eqns)
        self.tied: list[int] = []
        self.moved: dict[int, int] = {}
        self.made: dict[Var, int] = {}
        self._env: dict[Var, Atom] = {}
        cuts, computed_with = set[Var](), _computed_with(eqns)
        for i, eqn in enumerate(eqns):
            given = [a for a in self._given(eqn) if isinstance(a, Var)]
            if self._touches(eqn, "dynamic_slice"):
                cuts.update(eqn.outvars)
                self.moved[i] = self._last(given)
            elif eqn.primitive.name == "optimization_barrier":
                pairs = zip(eqn.invars, eqn.outvars, strict=True)
                if any(
                    isinstance(a, Var) and a in cuts and v not in computed_with for a, v in pairs
                ):
                    self.tied.append(i)
                    self.moved[i] = self._last(given)
            if i not in self.moved and any(self._is_moved(a) and a not in cuts for a in given):
                self.moved[i] = self._last(given)
            self.made.update((v, i) for v in eqn.outvars)

    def _source(self, a: Atom) -> Atom:
        return a if isinstance(a, Literal) else self.origin.get(a, a)

    def _touches(self, eqn: JaxprEqn, *names: str) -> bool:
        """Whether `eqn`, of one of these names, is of a slice of a stack."""
        return eqn.primitive.name in names and self._source(eqn.invars[0]) in self.stacks

    def _given(self, eqn: JaxprEqn) -> list[Atom]:
        """What `eqn` reads. A slice comes, and leaves, whatever barriers stand in front of that."""
        if self._touches(eqn, "dynamic_slice", "dynamic_update_slice"):
            return [*map(self._source, eqn.invars)]
        return [*eqn.invars]

    def _is_moved(self, a: Var) -> bool:
        return self.made.get(a, -1) in self.moved

    def _last(self, given: Sequence[Var]) -> int:
        """The last of the equations that stay which leads to one of `given`."""
        at = (self.made.get(a, -1) for a in given)
        return max((self.moved.get(i, i) for i in at), default=-1)

    def read(self, a: Atom) -> Any:
        """What stands for `a`."""
        return a if isinstance(a, Literal) else self._env.get(a, a)

    def emit(self) -> list[JaxprEqn]:
        """The equations in their new order; `read` gives what stands for their results."""
        behind: dict[int, list[int]] = {}
        for i, at in self._by_need().items():
            behind.setdefault(at, []).append(i)
        self._in_order = sorted(self.tied, key=lambda i: (self.moved[i], i))
        self._written: list[list[Var]] = []  # by each of `tied` so far
        self._cut: set[Var] = set()  # slices so far
        found: list[JaxprEqn] = []
        for i in range(-1, len(self.eqns)):
            if i >= 0 and i not in self.moved:
                found.append(self._emitted(i))
            for j in behind.get(i, ()):
                found.append(self._tied(j, i) if j in self.tied else self._emitted(j))
        return found

    def _by_need(self) -> dict[int, int]:
        """`moved`, in which what cuts slices changes places: what is read first comes first, so none
        comes behind what reads it."""
        read_by = readers(self.eqns)
        cuts = [i for i in self.moved if self._touches(self.eqns[i], "dynamic_slice")]

        def need(i: int) -> int:
            at = (self.moved.get(j, j) for j in read_by.get(self.eqns[i].outvars[0], ()))
            return min(at, default=len(self.eqns))

        order = dict(zip(cuts, sorted(cuts, key=need), strict=True))
        return {order.get(i, i): self.moved[order.get(i, i)] for i in self.moved}

    def _emitted(self, i: int) -> JaxprEqn:
        eqn = self.eqns[i]
        if self._written and self._touches(eqn, "dynamic_update_slice"):
            self._written[-1].append(eqn.outvars[0])
        if self._touches(eqn, "dynamic_slice"):
            self._cut.update(eqn.outvars)
        return eqn.replace(invars=[self.read(a) for a in self._given(eqn)])

    def _tied(self, i: int, at: int) -> JaxprEqn:
        """Barrier `i`, which stands behind equation `at`, with what else it holds."""
        eqn = self.eqns[i]
        more = self._running(at, eqn.invars)
        if more:
            more += self._next_slices(i)
            more += self._written[-_LATER] if len(self._written) >= _LATER else []
        self._written.append([])
        fenced = [compat.new_var(self.read(v).aval) for v in more]
        made = compat.new_equation(
            eqn.primitive,
            [self.read(a) for a in (*eqn.invars, *more)],
            [*eqn.outvars, *fenced],
            {},
            eqn,
        )
        self._env.update(zip(more, fenced, strict=True))
        return made

    def _next_slices(self, i: int) -> list[Var]:
        """Those that the updates behind barrier `i` wait for."""
        at = self._in_order.index(i) + 1
        later = [a for j in self._in_order[at : at + _AHEAD] for a in self.eqns[j].invars]
        held = {*self.eqns[i].invars}
        return [a for a in dict.fromkeys(later) if a in self._cut and a not in held]

    def _running(self, at: int, given: Sequence[Atom]) -> list[Var]:
        """The newest value that exists in memory behind equation `at` and that is read later."""
        later = [e for j, e in enumerate(self.eqns) if j > at and j not in self.moved]
        read = {a for eqn in later for a in eqn.invars if isinstance(a, Var)} - {*given}
        by_kernels = {
            a
            for eqn in later
            if class_of(eqn) is Class.HEAVY
            for a in eqn.invars
            if isinstance(a, Var)
        }
        for j in range(at, -1, -1):
            if j in self.moved:
                continue
            exists = class_of(self.eqns[j]) in (Class.HEAVY, Class.REDUCE)
            for v in self.eqns[j].outvars:
                if v in read and (exists or v in by_kernels):
                    return [v]
        return []


def _computed_with(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """What leads to products and other kernels of their own; what only updates read does not."""
    found: set[Var] = set()
    for eqn in reversed(eqns):
        name = eqn.primitive.name
        if name == "optimization_barrier":
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            found.update(a for a, v in pairs if v in found and isinstance(a, Var))
        elif name != "dynamic_update_slice" and (
            class_of(eqn) is Class.HEAVY or not found.isdisjoint(eqn.outvars)
        ):
            found.update(a for a in eqn.invars if isinstance(a, Var))
    return found
