"""sub_batches: a flat jaxpr made again with its work on samples for one sub-batch.

    what is the same for all samples and what is summed early, of the whole batch
    begin: the first sample of the sub-batch, what of the above it reads, the totals so far
        the work on samples, of one sub-batch; its sums added to the totals, its results put in place
    end: the totals
    everything after that, once

So one sub-batch stands for all of them, between two *boundaries*: for the Program, for policies, and
for `rewrite`, which makes a loop of the equations between them. Sums are kept in float32 or wider; a
loop over layers adds its stacks to their totals slice by slice, as it would update weights
(`updates`). A value as large as the batch that does not depend on its samples (zeros, a dropout
mask) is made for the sub-batch alone; a value that is no larger than its inputs (a cast weight) is
made once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from vmem_jax import jax_compat as compat
from vmem_jax.capture.batch import Batch
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.def_use import makers
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.primitives import Class, class_of, exchanges_operands, nbytes
from vmem_jax.capture.sliced import Slicer, opened, put
from vmem_jax.capture.updates import updated_in_loops
from vmem_jax.capture.wide_sums import with_wide_sums
from vmem_jax.core.program import BEGIN, END, Buffer, Step
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

begin_p = Primitive(BEGIN)
"""(what the sub-batch reads, what the first `started` totals start at) -> (its first sample i32[],
what it reads, the totals so far). Other totals start at zero."""

end_p = Primitive(END)
"""(totals with this sub-batch, what it read) -> (totals)."""

begin_p.multiple_results = end_p.multiple_results = True
begin_p.def_abstract_eval(lambda *_, avals, started: list(avals))
end_p.def_abstract_eval(lambda *given, count: list(given[:count]))


@dataclasses.dataclass(frozen=True)
class SubBatches:
    """The division of a step's batch into sub-batches.

    Attributes:
      count: the number of sub-batches.
      size: samples in each sub-batch, except perhaps one, which has the first samples.
      smaller: the step for a smaller sub-batch, with the same equations; None if there is none.
      smaller_size: samples in the smaller sub-batch.
      unroll: how many of them an iteration of their loop runs, where that is asked for.
    """

    count: int
    size: int
    smaller: ClosedJaxpr | None = None
    smaller_size: int = 0
    unroll: int = 1

    @property
    def is_even(self) -> bool:
        """Whether no sub-batch can be smaller than it is with so many of them."""
        whole = self.size * (self.count - (self.smaller is not None)) + self.smaller_size
        return self.size == -(-whole // self.count)


def divided(
    flat: ClosedJaxpr,
    batch: Batch,
    count: int,
    size: int | None = None,
    one_gpu: bool = False,
) -> tuple[ClosedJaxpr, SubBatches]:
    """`flat` for one of at most `count` sub-batches, and their division.

    All are equal, except a smaller one if `count` does not divide the batch, or where `size` says how
    many samples the others have. For `one_gpu` layouts are stated (`Slicer`), and 16-bit products are
    added up in float32 (`wide_sums`): XLA:CPU lacks such products, and several devices would exchange
    the wide ones.
    """
    size = size or -(-batch.size // count)
    whole, left = divmod(batch.size, size)
    most = _Divider(flat, batch, size, one_gpu).run()
    if not left:
        return most, SubBatches(whole, size)
    smaller = _Divider(flat, batch, left, one_gpu).run()
    names = lambda closed: [eqn.primitive for eqn in compat.open_jaxpr(closed).eqns]
    assert names(most) == names(smaller), "the smaller sub-batch differs in size alone"
    return most, SubBatches(whole + 1, size, smaller, left)


Replace = Callable[[Sequence[ClosedJaxpr]], tuple[Sequence[ClosedJaxpr], Mapping[str, Any]]]
"""Jaxprs with the same equations on other shapes -> the same with some of these replaced, which are
chosen in the first, and how many are, by fields of `Program`."""


@dataclasses.dataclass(frozen=True)
class Replaced:
    """Equations of a step that others stand for. These say nothing about samples, so the batch is
    divided first.

    Attributes:
      before: the step with the equations that are replaced.
      replace: replaces them, in the whole step or in that of a sub-batch.
    """

    before: ClosedJaxpr
    replace: Replace

    def within(
        self, most: ClosedJaxpr, sub_batches: SubBatches
    ) -> tuple[ClosedJaxpr, SubBatches, Mapping[str, Any]]:
        """What `divided` made of `before`, with its equations replaced, and how many are."""
        every = [most] if sub_batches.smaller is None else [most, sub_batches.smaller]
        (most, *others), counts = self.replace(every)
        smaller = others[0] if others else None
        return most, dataclasses.replace(sub_batches, smaller=smaller), counts


def twins(ours: ClosedJaxpr, theirs: ClosedJaxpr, count: int | None = None) -> dict[Var, Var]:
    """For each variable of `ours` that of `theirs`, which has the same equations on other shapes; of
    what the first `count` equations make, if that is given."""
    a, b = compat.open_jaxpr(ours), compat.open_jaxpr(theirs)
    pairs = [*zip(a.invars, b.invars, strict=True), *zip(a.constvars, b.constvars, strict=True)]
    for one, other in zip(a.eqns[:count], b.eqns[:count], strict=True):
        pairs += zip(one.outvars, other.outvars, strict=True)
    return dict(pairs)


def totals_nbytes(flat: ClosedJaxpr, batch: Batch) -> int:
    """Bytes of the totals that are there at once behind the last sub-batch, however many there are.
    Those that are results of the step do not count, nor what a loop may carry into one."""
    divider = _Divider(flat, batch, batch.size)
    needed, after = divider._needed()
    loops = [divider.eqns[i] for i in after if divider.eqns[i].primitive.name == "scan"]
    ends = [*divider.opened.outvars, *(a for eqn in loops for a in eqn.invars)]
    others = {a for a in ends if isinstance(a, Var)}
    return sum(nbytes(divider._total_aval(v)) for v in needed if v not in others)


def in_parts(
    buffers: Sequence[Buffer], steps: Sequence[Step], count: int
) -> tuple[list[Buffer], list[Step]]:
    """`steps` with those between the boundaries repeated `count` times, and `buffers`, of which only
    those can move that are of one sub-batch alone."""
    ops = [step.op for step in steps]
    begin, end = ops.index(BEGIN), ops.index(END)
    steps = [
        dataclasses.replace(step, times=count) if begin < s < end else step
        for s, step in enumerate(steps)
    ]
    inside = {b for step in steps if step.times > 1 for b in step.writes}
    inside.difference_update(
        b for step in steps if step.times == 1 for b in (*step.reads, *step.writes)
    )
    buffers = [
        dataclasses.replace(buffer, movable=buffer.movable and b in inside, slices=1)
        for b, buffer in enumerate(buffers)
    ]
    return buffers, steps


class _Divider:
    def __init__(self, flat: ClosedJaxpr, batch: Batch, size: int, one_gpu: bool = False) -> None:
        self.flat, self.batch, self.size, self.one_gpu = flat, batch, size, one_gpu
        self.opened = compat.open_jaxpr(flat)
        self.eqns: Sequence[JaxprEqn] = self.opened.eqns
        self.maker = makers(self.eqns)
        self.inlined = self._inlined()
        self.early = self._makers([v for i in batch.early for v in self.eqns[i].outvars])
        self.entered: dict[Var, Var] = {}  # what the sub-batch reads, and its variable there
        self.copied: dict[Var, Atom] = {}
        self.inside: list[JaxprEqn] = []
        self.calls = Calls(self.inside.append)

    def run(self) -> ClosedJaxpr:
        batch = self.batch
        needed, after = self._needed()
        live = self._live({*needed})
        offset = compat.new_var(jax.typeof(np.int32(0)))
        emitter = Slicer(self.eqns, batch, self.size, offset, self.calls, self._whole, self.one_gpu)
        before: dict[Var, Var] = {}  # totals so far
        now: dict[Var, Atom] = {}
        for i in live:
            emitter.emit(i)
            for v in self.eqns[i].outvars:
                if v in needed:
                    before[v] = compat.new_var(self._total_aval(v))
                    now[v] = self._add(v, before[v], emitter, self.eqns[i])
        first, last = self.eqns[live[0]], self.eqns[live[-1]]
        begins = [offset, *self.entered.values(), *before.values()]
        self._add_in_loops(begins, before, now)
        if self.one_gpu:
            self.inside = with_wide_sums(self.inside, {*before.values()}, [*now.values()])
        begin = compat.new_equation(
            begin_p,
            [*self.entered],
            begins,
            {"avals": tuple(v.aval for v in begins), "started": 0},
            first,
        )
        early = self._makers(self.entered) | self.early
        mine = {v for v in before if self.maker[v] not in early}  # the others are there already
        is_done = lambda v, total: v in mine and _alike(v, total)
        sums = [v if is_done(v, b) else compat.new_var(b.aval) for v, b in before.items()]
        operands = [*now.values(), *self.entered.values()]
        end = compat.new_equation(end_p, operands, sums, {"count": len(sums)}, last)
        finish: list[JaxprEqn] = []
        for v, total in zip(before, sums, strict=True):
            if total is not v and v in mine:
                aval: Any = v.aval
                make = lambda x, aval=aval: x.reshape(aval.shape).astype(aval.dtype)
                Calls(finish.append).bind(make, [total], last)
                finish[-1] = finish[-1].replace(outvars=[v])
        eqns = [self.eqns[i] for i in sorted(early)]
        eqns += [begin, *self.inside, end, *finish]
        eqns += [self.eqns[i] for i in sorted(after - early)]
        ours = self.opened
        parts = (ours.constvars, compat.constants(self.flat), ours.invars, ours.outvars, eqns)
        return drop_dead(compat.close(*parts, like=self.flat))

    def _add_in_loops(
        self, begins: Sequence[Var], before: dict[Var, Var], now: dict[Var, Atom]
    ) -> None:
        """Has the stacks that loops make added to their totals where these make them, by the slice:
        no stack of gradients lies beside its total.

        Args:
          begins: what the first boundary returns; of that `before` are the totals so far.
          now: what the totals are after the sub-batch; changed.
        """
        made = {*begins, *(v for eqn in self.inside for v in eqn.outvars)}
        read = [*(a for eqn in self.inside for a in eqn.invars), *now.values()]
        free = dict.fromkeys(a for a in read if isinstance(a, Var) and a not in made)
        given, totals = [*begins, *free], {*before.values()}
        part = compat.close([], [], given, [*now.values()], self.inside, like=self.flat)
        part, _ = updated_in_loops(part, [v in totals for v in given], (), ())
        opened = compat.open_jaxpr(part)
        self.inside = [*opened.eqns]
        now.update(zip([*now], opened.outvars, strict=True))

    def _needed(self) -> tuple[dict[Var, None], set[int]]:
        """What of the work on samples is needed after it, and the equations that run there."""
        need = {a for a in self.opened.outvars if isinstance(a, Var)}
        needed: dict[Var, None] = {}
        after: set[int] = set()
        for i in reversed(range(len(self.eqns))):
            eqn = self.eqns[i]
            wanted = [v for v in eqn.outvars if v in need]
            if not wanted or i in self.early:
                continue
            if not self.batch.is_split(i, eqn) or self._moves(eqn):
                after.add(i)
                need.update(a for a in eqn.invars if isinstance(a, Var))
                continue
            for v in wanted:
                needed[v] = None
        return needed, after

    def _moves(self, eqn: JaxprEqn) -> bool:
        """Whether an equation on sums does not shrink them, and so runs once, on the totals."""
        read = [self.batch.of(a) for a in eqn.invars]
        sums = {a for a, v in zip(eqn.invars, read, strict=True) if v.summed >= 0}
        if len(sums) != 1 or any(v.layout is not None for v in read) or len(eqn.outvars) != 1:
            return False
        if eqn.primitive.name == "scan":
            return False
        [a] = sums
        if a in self.maker and exchanges_operands(self.eqns[self.maker[a]], eqn):
            return False  # the product makes it so: behind the loop the update would transpose it
        return nbytes(self._total_aval(a)) <= nbytes(self._total_aval(eqn.outvars[0]))

    def _live(self, needed: set[Var]) -> list[int]:
        """The equations on samples that lead to `needed`, in order."""
        need, live = set(needed), []
        for i in reversed(range(len(self.eqns))):
            eqn = self.eqns[i]
            if self.batch.is_split(i, eqn) and any(v in need for v in eqn.outvars):
                live.append(i)
                need.update(a for a in eqn.invars if isinstance(a, Var))
        return live[::-1]

    def _makers(self, wanted: Iterable[Var]) -> set[int]:
        """The equations that lead to `wanted` from the arguments."""
        stack, found = list(wanted), set[int]()
        while stack:
            i = self.maker.get(stack.pop())
            if i is not None and i not in found:
                found.add(i)
                stack += [a for a in self.eqns[i].invars if isinstance(a, Var)]
        return found

    def _inlined(self) -> set[int]:
        """Equations that are the same for all samples, and cheaper to repeat than to keep."""
        price: dict[Var, int] = {}
        found = set()
        for i, eqn in enumerate(self.eqns):
            if i in self.batch.early or not all(self.batch.of(v).is_same for v in eqn.outvars):
                continue
            reads = {a for a in eqn.invars if isinstance(a, Var)}
            cost = sum(price.get(a, nbytes(a.aval)) for a in reads)
            size = sum(nbytes(v.aval) for v in eqn.outvars)
            if class_of(eqn) in (Class.VIEW, Class.FUSIBLE) and cost <= size:
                found.add(i)
                price.update((v, cost) for v in eqn.outvars)
        return found

    def _whole(self, v: Var) -> Atom:
        """What stands within the sub-batch for a value that is the same for all samples."""
        i = self.maker.get(v)
        if i is None:
            return v
        if i not in self.inlined:
            return self.entered.setdefault(v, compat.new_var(v.aval))
        if v not in self.copied:
            eqn = self.eqns[i]
            invars = [a if isinstance(a, Literal) else self._whole(a) for a in eqn.invars]
            outs = [compat.new_var(o.aval) for o in eqn.outvars]
            self.inside.append(eqn.replace(invars=invars, outvars=outs))
            self.copied.update(zip(eqn.outvars, outs, strict=True))
        return self.copied[v]

    def _total_aval(self, v: Var) -> Any:
        """The type in which `v` is kept from one sub-batch to the next."""
        aval: Any = v.aval
        layout = self.batch.values[v].layout
        if layout is not None:
            return aval.update(shape=opened(aval.shape, layout, self.batch.size))
        small = jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
        return aval.update(dtype=jnp.dtype("float32")) if small else aval

    def _add(self, v: Var, before: Var, emitter: Slicer, like: JaxprEqn) -> Atom:
        """Emits what makes the total so far that with this sub-batch."""
        layout = self.batch.values[v].layout
        part = emitter.env[v]
        if self.batch.values[v].is_same:
            return part  # of each sub-batch the same
        if layout is None:
            add = lambda total, part: total + part.astype(total.dtype)
            return self.calls.bind(add, [before, part], like, "add")[0]
        write = functools.partial(put, layout=layout, size=self.size)
        return self.calls.bind(write, [before, part, emitter.offset], like, ("put", layout))[0]


def _alike(a: Any, b: Any) -> bool:
    return (a.aval.shape, a.aval.dtype) == (b.aval.shape, b.aval.dtype)
