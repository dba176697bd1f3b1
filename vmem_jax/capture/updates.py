"""updates: runs the optimiser's updates of scanned layers inside the loop that makes their gradients.

The backward loop over scanned layers stacks their gradients, and the optimiser reads the stacks,
which are as large as the parameters. But an optimiser works elementwise. So the equations behind the
loop that make new stacks (parameters, moments) from the gradients run in its body, each on the slice
of its iteration, and the stack of gradients never exists:

    for i in layers, last first:
        gradients of layer i by the slices i of parameters and residuals
        -- barrier --
        slices i of the new moments, by these gradients and slices i of the old ones
        -- barrier --
        slices i of the new parameters, by slices i of these moments and of the old parameters

A new stack takes over the memory of a donated old one, which is carried, read at i and written at i.
The barrier orders all reads of old slices before the writes of new ones; a later read would make XLA
copy the whole stack. It holds gradients as they were computed, before they are cast for the update.
A new slice that others are made of, a moment, is written first and read where it was written, so it
never lies beside its stack. Stacks that only an update needs (a cast, a broadcast number) are made by
slices too, by the rules that cut a batch into sub-batches. Without donation nothing is gained, since
gradients then lie where the new stacks will.

This is not a choice of a plan, since it costs no memory: a value that exists for it alone must be
smaller than the gradients that disappear. The equations are unchanged. Results differ only where LLVM
or XLA rounds a product and a sum once in another fusion (in Adam's moments).

Readers of a whole stack of gradients (a global norm), and everything that depends on them, stay
behind the loop; so do updates of memory that something else still reads.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vmem_jax import jax_compat as compat
from vmem_jax.capture.all_at_once import Stacked, stacked_by
from vmem_jax.capture.batch import Value, follow_slices
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.def_use import makers, readers
from vmem_jax.capture.donations import aliases, hosted_values
from vmem_jax.capture.flatten import drop_dead, inline
from vmem_jax.capture.layouts import Layout
from vmem_jax.capture.primitives import Class, class_of, is_array, last_casts, nbytes
from vmem_jax.capture.shards import Shards, follow_shards, is_typed
from vmem_jax.capture.sliced import Slicer, cut, opened, put
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

_SLICES = Layout(0)


def updated_in_loops(
    flat: ClosedJaxpr,
    donated: Sequence[bool],
    hosted: Sequence[tuple[int, int | None]],
    shardings: Sequence[Any],
    sliced: Collection[int] = (),
) -> tuple[ClosedJaxpr, tuple[Stacked, ...]]:
    """`flat` with updates in the loops that make their gradients, and what could not be moved there.

    Args:
      donated: for each argument whether the caller gives it up.
      hosted: for each argument in host memory its index, and that of the output that goes there
        again. Such stacks come and go as a whole, so what reads them is not moved.
      sliced: those of them that come and go by slices instead (`hosted_stacks`).
      shardings: the `jax.sharding.Sharding` of each argument; none for those on one device. Stacks
        that are split along the layers are left alone.
    """
    stacked: list[Stacked] = []
    shards: Shards | None = None
    for n in range(len(_scans(flat))):  # each is replaced by one
        shards = follow_shards(flat, shardings) if shards is None else shards
        loop = Loop(flat, _scans(flat)[n], donated, hosted, shards, sliced)
        if loop.saved:
            flat, shards = loop.moved(), None
        stacked += stacked_by(loop)
    return flat, tuple(stacked)


def _scans(flat: ClosedJaxpr) -> list[int]:
    return [i for i, e in enumerate(compat.open_jaxpr(flat).eqns) if e.primitive.name == "scan"]


class Loop:
    """One scan of `flat`, and what of the equations behind it can run in its body.

    Attributes:
      divisible: its stacks that can be read by the slice.
      origins: of what can be made by the slice those of these that it is made of.
      updated: the results of the step that are made in its body.
      saved: bytes of the stacks that no longer exist then.
    """

    def __init__(
        self,
        flat: ClosedJaxpr,
        at: int,
        donated: Sequence[bool],
        hosted: Sequence[tuple[int, int | None]],
        shards: Shards,
        sliced: Collection[int],
    ) -> None:
        self.flat, self.at, self.shards = flat, at, shards
        self.opened = compat.open_jaxpr(flat)
        self.eqns = self.opened.eqns
        self.eqn = self.eqns[at]
        self.consts, self.carry = compat.scan_counts(self.eqn)
        self.length: int = self.eqn.params["length"]
        self._step = -1 if self.eqn.params["reverse"] else 1
        self.results = {a for a in self.opened.outvars if isinstance(a, Var)}
        self.maker = makers(self.eqns)
        self.readers = readers(self.eqns)
        self.hosted = hosted_values(flat, [pair for pair in hosted if pair[0] not in sliced])
        self.over = {o: i for i, o in aliases(flat, donated, hosted_values(flat, hosted))}
        self.sliced = {self.opened.invars[i] for i in sliced}
        for i, o in hosted:
            made = None if o is None or i not in sliced else self.opened.outvars[o]
            if isinstance(made, Var) and made in self.maker:
                self.over.setdefault(made, self.opened.invars[i])
        self.divisible = [v for v in self.eqn.outvars[self.carry :] if self._is_divisible(v)]
        self.origins: dict[Var, frozenset[Var]] = {v: frozenset([v]) for v in self.divisible}
        self.saved, self.entered = 0, list[Var]()
        self.movable: set[int] = set()
        self.updated: list[Var] = []
        self.needed = set(self.readers) | self.results
        if any(v in self.readers for v in self.divisible):
            self._follow()
            self._choose()

    def _is_divisible(self, v: Var) -> bool:
        """Whether slices of `v` can be cut out where they lie."""
        return is_array(v.aval) and self.shards.are_slices_whole(v) and not is_typed(v)

    def _follow(self) -> None:
        """Finds what there is before the loop, or could be, and what can be made by the slice."""
        made = [Value(_SLICES) if v in self.origins else Value(late=0) for v in self.eqn.outvars]
        self.batch = follow_slices(self.flat, self.at, made, self.length)
        self.available = {*self.opened.invars, *self.opened.constvars} - self.hosted
        self.streamed = {*self.hosted}
        for i, eqn in enumerate(self.eqns):
            given = {a for a in eqn.invars if isinstance(a, Var)}
            if not given.isdisjoint(self.streamed):
                self.streamed.update(eqn.outvars)
            if i == self.at or not (given <= self.available or i < self.at):
                pass
            elif i < self.at or not (class_of(eqn) is Class.HEAVY or eqn.effects):
                self.available.update(eqn.outvars)
                continue
            if i > self.at and self._is_movable(eqn, given):
                self.movable.add(i)
                inner = [self.origins[a] for a in given if a in self.origins]
                self.origins[eqn.outvars[0]] = frozenset().union(*inner)

    def _is_movable(self, eqn: JaxprEqn, given: set[Var]) -> bool:
        values = [self.batch.of(v) for v in eqn.outvars]
        return (
            class_of(eqn) is not Class.HEAVY
            and len(values) == 1
            and values[0].layout is not None
            and values[0].late < 0
            and given <= self.available | self.origins.keys()
        )

    # -- which

    def _choose(self) -> None:
        """Chooses what is updated: as much as can be, if stacks of the loop then no longer exist."""
        self.updated = [
            v
            for v in dict.fromkeys(a for a in self.opened.outvars if isinstance(a, Var))
            if v in self.origins and v not in self.divisible and v in self.over
        ]
        while True:
            self.live, self.needed = self._live()
            kept = [
                v
                for v in self.updated
                if not self.origins[v] <= self.needed and not self._is_read_elsewhere(v)
            ]
            if kept == self.updated:
                break
            self.updated = kept
        gone = [v for v in self.divisible if v not in self.needed]
        self.saved = sum(nbytes(v.aval) for v in gone) if self.updated else 0
        if not self.saved:
            return
        self._emit()
        exists = lambda v: v not in self.maker or v in self.results or self._is_kernel(v)
        if sum(nbytes(v.aval) for v in self.entered if not exists(v)) >= self.saved:
            self.saved, self.updated = 0, []
            self.live, self.needed = self._live()

    def _is_kernel(self, v: Var) -> bool:
        return class_of(self.eqns[self.maker[v]]) in (Class.HEAVY, Class.REDUCE)

    def _live(self) -> tuple[set[int], set[Var]]:
        """The equations that run outside of the body where `updated` is made in it, and what
        these and the results of the step need."""
        mine, live = set(self.updated), {self.at}
        needed = self.results - mine
        for i in reversed(range(len(self.eqns))):
            eqn = self.eqns[i]
            made = any(v in needed and v not in mine for v in eqn.outvars)
            if made or eqn.effects or i == self.at:
                live.add(i)
                needed.update(a for a in eqn.invars if isinstance(a, Var))
        return live, needed

    def _is_read_elsewhere(self, v: Var) -> bool:
        """Whether the argument whose memory `v` takes over is read where nothing proves that this
        comes before the loop."""
        old = self.over[v]
        operands = [p for p, a in enumerate(self.eqn.invars) if self._source(a) is old]
        if old in self.results or not self._is_divisible(old):
            return True
        if any(p < self.consts + self.carry for p in operands):
            return True
        return not all(self.available.issuperset(self.eqns[i].outvars) for i in self._others(old))

    def _source(self, atom: Atom) -> Atom:
        """What `atom` is a view of, or itself."""
        while isinstance(atom, Var) and atom in self.maker:
            eqn = self.eqns[self.maker[atom]]
            if class_of(eqn) is not Class.VIEW:
                break
            atom = eqn.invars[0]
        return None if isinstance(atom, Literal) else atom

    def _others(self, old: Var) -> set[int]:
        """Where values end that are made of `old` for something else than the loop or what is made in
        it: equations whose results exist."""
        outside = self.live - self._leading
        waiting, ends = [i for i in self.readers.get(old, ()) if i in outside], set[int]()
        seen = {*waiting}
        while waiting:
            i = waiting.pop()
            outs = self.eqns[i].outvars
            if any(v in self.results or self._is_kernel(v) for v in outs):
                ends.add(i)
                continue
            more = {r for v in outs for r in self.readers.get(v, ()) if r in outside} - seen
            waiting += more
            seen |= more
        return ends

    @functools.cached_property
    def _leading(self) -> set[int]:
        """The equations that the loop waits for, and itself."""
        return {self.at, *self._makers(a for a in self.eqn.invars if isinstance(a, Var))}

    def _makers(self, wanted: Iterable[Var]) -> set[int]:
        """The equations that lead to `wanted` from the arguments."""
        waiting, found = list(wanted), set[int]()
        while waiting:
            i = self.maker.get(waiting.pop())
            if i is not None and i not in found:
                found.add(i)
                waiting += [a for a in self.eqns[i].invars if isinstance(a, Var)]
        return found

    # -- the new body

    def _emit(self) -> None:
        """Makes the new body: consts, entered, carry, old stacks, xs, i -> carry, new stacks, ys.

        An i that is counted is carried, behind the stacks.
        """
        closed = drop_dead(inline(self.eqn.params["jaxpr"]))
        body, equations = compat.open_jaxpr(closed), list[JaxprEqn]()
        calls, end = Calls(equations.append), self.consts + self.carry
        like = self.eqns[min(self.movable)]
        self.index = compat.new_var(jax.typeof(np.int32(0)))
        self.carried = {self.over[v]: compat.new_var(v.aval) for v in self.updated}
        operands = range(end, len(self.eqn.invars))
        self.xs = [p for p in operands if self._source(self.eqn.invars[p]) not in self.carried]
        entered: dict[Var, Var] = {}
        enter = lambda v: entered.setdefault(v, compat.new_var(v.aval))
        before = lambda v: self.carried[v] if v in self.carried else enter(v)
        slicer = Slicer(self.eqns, self.batch, 1, self.index, calls, before)
        for p in sorted({*operands} - {*self.xs}):
            part = slicer.read(self.eqn.invars[p], _SLICES, like)
            calls.bind(lambda x: x[0], [part], like)
            equations[-1] = equations[-1].replace(outvars=[body.invars[p]])
        casts = last_casts(body)
        equations += [e for e in body.eqns if casts.keys().isdisjoint(e.outvars)]

        made = dict.fromkeys(v for eqn in body.eqns for v in eqn.outvars)
        results = [*dict.fromkeys(a for a in body.outvars if isinstance(a, Var) and a in made)]
        inner = [casts[v].invars[0] if v in casts else v for v in results]
        behind = lambda v: now[self.carried[v]] if v in self.carried else enter(v)
        slicer = Slicer(self.eqns, self.batch, 1, self.index, calls, behind)
        apart = [stack for v, stack in self.carried.items() if v in self.sliced]
        now: dict[Any, Any] = dict(zip(apart, apart, strict=True))
        source = {v: casts[a].invars[0] if a in casts else a for v, a in self._made_by(body)}
        for a, stacks in self._together(source, made).items():
            parts = [slicer.read(v, _SLICES, like) for v in stacks]
            now[a], *fenced = calls.fence([a, *parts], like)
            slicer.hold(dict(zip(stacks, fenced, strict=True)), _SLICES)
        held = [a for a in (*self.carried.values(), *dict.fromkeys(inner)) if a not in now]
        if any(v not in self.sliced for v in self.carried):
            # what the others are made of is written over behind it, too
            others = [now[a] for a in inner if a in now]
            now |= zip(held, calls.fence([*held, *others], like), strict=False)
        for v, eqn in casts.items():
            now[v] = compat.new_var(v.aval)
            given = now.get(eqn.invars[0], eqn.invars[0])
            equations.append(eqn.replace(invars=[given], outvars=[now[v]]))
        read = lambda a: a if isinstance(a, Literal) else now.get(a, a)
        for v, a in zip(self.eqn.outvars, body.outvars, strict=True):
            if v in self.origins:
                slicer.env[v] = calls.bind(lambda x: x[None], [read(a)], like)[0]
        makers = self._makers(self.updated)
        moved = sorted(makers & self.movable)
        read_again = {v for v in self.updated if not {*moved}.isdisjoint(self.readers.get(v, ()))}
        stack_of = {v: now[self.carried[self.over[v]]] for v in self.updated}
        written: dict[Var, Any] = {}
        for i in moved:
            slicer.emit(i)
            for v in read_again.intersection(self.eqns[i].outvars):
                if self.over[v] not in self.sliced and self._is_made_alone(v, makers):
                    [stack] = self._write(v, stack_of[v], slicer.env[v], calls, like)
                    [written[v]] = calls.fence([stack], like)
                    [slicer.env[v]] = self._read(v, written[v], calls, like)
                else:
                    [slicer.env[v]] = calls.fence([slicer.env[v]], like)
        later = [v for v in self.updated if v not in written and self.over[v] not in self.sliced]
        if not self._are_in_order(read_again):
            slices, stacks = [slicer.env[v] for v in later], [stack_of[v] for v in later]
            fenced = calls.fence([*slices, *stacks], like)
            slicer.env.update(zip(later, fenced, strict=False))
            stack_of.update(zip(later, fenced[len(later) :], strict=True))
        for v in self.updated:
            if v not in written:
                [written[v]] = self._write(v, stack_of[v], slicer.env[v], calls, like)
        kept = [
            p for p in range(self.carry, len(body.outvars)) if self.eqn.outvars[p] in self.needed
        ]
        counted = calls.bind(lambda i: i + self._step, [self.index], like) if self.sliced else []
        self.entered = [*entered]
        self.made = [
            *self.eqn.outvars[: self.carry],
            *self.updated,
            *(compat.new_var(i.aval) for i in counted),
            *(self.eqn.outvars[p] for p in kept),
        ]
        self.body = compat.close(
            body.constvars,
            compat.constants(closed),
            [
                *body.invars[: self.consts],
                *entered.values(),
                *body.invars[self.consts : end],
                *self.carried.values(),
                *([self.index] if counted else []),
                *(body.invars[p] for p in self.xs),
                *([] if counted else [self.index]),
            ],
            [
                *(read(a) for a in body.outvars[: self.carry]),
                *(written[v] for v in self.updated),
                *counted,
                *(read(body.outvars[p]) for p in kept),
            ],
            equations,
            closed,
        )

    def _made_by(self, body: Any) -> Iterable[tuple[Var, Any]]:
        """The stacks that can be read by the slice, each with the result of `body` that makes it."""
        return [
            (v, a)
            for v, a in zip(self.eqn.outvars, body.outvars, strict=True)
            if v in self.origins and isinstance(a, Var)
        ]

    def _together(self, source: Mapping[Var, Var], made: Collection[Var]) -> dict[Var, list[Var]]:
        """Of each value of the body that gradients are made of the stacks in host memory that are
        updated by them.

        Their slices are needed where it is there. A barrier over both has XLA fetch them a few
        products earlier; without it XLA:GPU begins where they are read (0.11.2).

        Args:
          source: of each stack of gradients that value.
          made: what the body makes, in order.
        """
        order = {a: n for n, a in enumerate(made)}
        found: dict[Var, list[Var]] = {}
        for v in self.updated:
            if self.over[v] in self.sliced:
                last = max((source[g] for g in self.origins[v]), key=lambda a: order.get(a, -1))
                found.setdefault(last, []).append(self.over[v])
        return found

    def _are_in_order(self, fenced: set[Var]) -> bool:
        """Whether every slice that is written over has been read by then: it is read for what is
        written there, or for what that is made of behind a barrier of its own.

        Args:
          fenced: those of `updated` that have one.
        """
        owner = {old: v for v, old in self.over.items() if old in self.carried}
        for v in self.updated:
            waiting, seen = [v], set[Var]()
            while waiting:
                eqn = self.eqns[self.maker[waiting.pop()]]
                for a in {a for a in eqn.invars if isinstance(a, Var)} - fenced - seen:
                    seen.add(a)
                    if a in self.maker and self.maker[a] != self.at:
                        waiting.append(a)
            for old in seen & owner.keys() - {self.over[v]}:
                if v not in fenced or self.maker[v] not in self._makers([owner[old]]):
                    return False
        return True

    def _is_made_alone(self, v: Var, makers: set[int]) -> bool:
        """Whether the slice that `v` is written over is read for nothing behind the barrier but `v`,
        so that it can be written at once: what reads `v` then reads it there, and no slice lies
        beside.

        Args:
          makers: the equations that lead to all that is updated.
        """
        alone, made_of_old = self._makers([v]), {self.over[v]}
        for i in sorted(makers - {self.at}):
            eqn = self.eqns[i]
            if made_of_old.isdisjoint(a for a in eqn.invars if isinstance(a, Var)):
                continue
            if i not in alone:
                return False
            made_of_old.update(w for w in eqn.outvars if w is not v)
        return True

    def _read(self, v: Var, stack: Var, calls: Calls, like: JaxprEqn) -> list[Any]:
        """Emits what reads the slice of the new stack `v`, which is `stack`."""
        layout = self.batch.of(v).layout
        assert layout is not None, "a new stack is made by the slice"
        read = lambda stack, i: cut(stack, i, layout, self.length, 1)
        return calls.bind(read, [stack, self.index], like)

    def _write(self, v: Var, stack: Var, x: Atom, calls: Calls, like: JaxprEqn) -> list[Any]:
        """Emits what writes slice `x` of the new stack `v` into `stack`."""
        aval: Any = v.aval
        layout, shape = self.batch.of(v).layout, aval.shape
        assert layout is not None, "a new stack is made by the slice"
        write = lambda stack, x, i: put(
            stack.reshape(opened(shape, layout, self.length)), x, i, layout, 1
        ).reshape(shape)
        return calls.bind(write, [stack, x, self.index], like)

    def moved(self) -> ClosedJaxpr:
        """`flat` with `updated` made in the body."""
        eqns, others = self.eqns, set[int]().union(*map(self._others, self.carried))
        tied = [*dict.fromkeys(v for i in sorted(others) for v in eqns[i].outvars)]
        before = {*range(self.at), *self._makers([*self.entered, *tied])}
        equations = [eqns[i] for i in sorted(before)]
        calls, end = Calls(equations.append), self.consts + self.carry
        now: dict[Var, Any] = {}
        held = [*self.carried]
        if tied:
            now = dict(zip([*held, *tied], calls.fence([*held, *tied], self.eqn), strict=True))
        # For stacks in host memory the index is counted, not read of an array: XLA then sees that it
        # follows from the loop's own counter, and copies slices. Otherwise a kernel fetches each over
        # the link, and fills the device meanwhile (0.11.2). XLA:CPU copies slices more often so.
        first: list[Atom] = []
        if self.sliced:
            start = np.int32(self.length - 1 if self._step < 0 else 0)
            first, indices = [Literal(start, self.index.aval)], []
        else:
            count = lambda: jnp.arange(self.length, dtype=jnp.int32)
            indices = calls.bind(count, [], self.eqn)
        given = self.eqn.invars
        operands = [
            *given[: self.consts],
            *self.entered,
            *given[self.consts : end],
            *(now.get(v, v) for v in held),
            *first,
            *(given[p] for p in self.xs),
            *indices,
        ]
        consts = self.consts + len(self.entered)
        carry = self.carry + len(held) + len(first)
        outs = calls.scan(self.body, consts, carry, operands, self.eqn)
        now = {v: now[v] for v in tied} | dict(zip(self.made, outs, strict=True))
        read = lambda a: a if isinstance(a, Literal) else now.get(a, a)
        for i in sorted(self.live - before - {self.at}):
            equations.append(eqns[i].replace(invars=[read(a) for a in eqns[i].invars]))
        ours = self.opened
        outvars = [read(a) for a in ours.outvars]
        parts = ours.constvars, compat.constants(self.flat), ours.invars, outvars, equations
        return drop_dead(compat.close(*parts, like=self.flat))
