"""batch: which equations of a step can run on a part of the batch, and what prevents it.

This is an abstract interpretation of the flat jaxpr. Each value is one of these:

- the same for all samples;
- batched: the samples lie along one of its dimensions (`layouts`);
- a sum over samples, complete only after the last sub-batch. Everything that is not linear in it is
  *late*: it runs after the loop;
- a mixture of samples (a maximum over the batch, a sort). It is late too, on the whole batch.

Late work on samples would run on the whole batch, so it defeats the loop. Therefore

- a sum from the arguments without any heavy equation (of a loss's mask) that work on samples reads is
  *early*: it is computed from the whole batch before the loop;
- if a heavy equation on samples is still late (behind a batch norm), the step cannot be split, and
  the first equation that needs all samples is named.

moDNN (Chen et al., DATE 2018, section III) accumulates the gradients of sub-batches, with the layers
of a framework in place of equations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import inline
from vmem_jax.capture.layouts import SUMMED, Layout, Where, ruled
from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.capture.rows import own_rows
from vmem_jax.capture.wanted_layouts import wanted
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """The abstract value of a variable.

    Attributes:
      layout: how the samples lie in it; None if it is the same for all samples.
      summed: the equation that first summed it over samples; −1 if it is no such sum.
      late: the equation that needs all samples and on which it depends; −1 if there is none.
      mixed: whether it is made of mixed samples and is as large as a batch.
      zero: whether all of it is zero.
    """

    layout: Layout | None = None
    summed: int = -1
    late: int = -1
    mixed: bool = False
    zero: bool = False

    @property
    def is_same(self) -> bool:
        """Whether it is known before the loop, and whole."""
        return self.layout is None and self.summed < 0 and self.late < 0


SAME = Value()


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Why a step cannot be split.

    Attributes:
      mixer: the index of the equation that needs all samples.
      reader: the heavy equation on samples that waits for it, or that is the mixer itself; −1 for
      none.
      why: another reason, for people.
    """

    mixer: int = -1
    reader: int = -1
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Batch:
    """A step whose work on samples can run in sub-batches.

    Attributes:
      size: samples in the batch.
      values: the abstract value of every variable.
      wants: for every equation, the layouts that its operands must have.
      early: equations that sum or mix samples before the loop.
      rows: equation -> the column of its indices that has each sample's position in the batch, as in
        `x[jnp.arange(n), labels]`.
    """

    size: int
    values: Mapping[Var, Value]
    wants: Sequence[Sequence[Where]]
    early: frozenset[int]
    rows: Mapping[int, int]

    def of(self, atom: Atom) -> Value:
        return _literal(atom) if isinstance(atom, Literal) else self.values[atom]

    def is_on_samples(self, eqn: JaxprEqn) -> bool:
        """Whether an equation reads samples, mixed ones included."""
        return any(v.layout is not None or v.mixed for v in map(self.of, eqn.invars))

    def is_split(self, i: int, eqn: JaxprEqn) -> bool:
        """Whether equation `i` runs once for each sub-batch."""
        if i in self.early:
            return False
        return any(v.late < 0 and not v.is_same for v in map(self.values.__getitem__, eqn.outvars))


def follow_batch(flat: ClosedJaxpr, layouts: Sequence[Layout | None], size: int) -> Batch | Mixing:
    """The batch analysis of the step `flat`, or why it cannot be split.

    Args:
      layouts: how the samples lie in each argument.
      size: samples in the batch; at least 2.
    """
    opened = compat.open_jaxpr(flat)
    effect = next((i for i, eqn in enumerate(opened.eqns) if eqn.effects), None)
    if effect is not None:
        return Mixing(effect, why="it has an effect, which would be repeated")
    given = {v: Value(layout) for v, layout in zip(opened.invars, layouts, strict=True)}
    given.update((v, _constant(c)) for v, c in _constants(flat))
    early: frozenset[int] = frozenset()
    while True:
        found = _follow(opened.eqns, given, size, early)
        light = _light(opened.eqns, found)
        awaited: set[int] = set()
        for i, eqn in enumerate(opened.eqns):
            late = max((found.values[v].late for v in eqn.outvars), default=-1)
            if late < 0 or not found.is_on_samples(eqn):
                continue
            if _is_heavy(eqn) and late not in light:
                return Mixing(late, i)
            if late != i:
                awaited.add(late)
        if not awaited & light:
            break
        early |= awaited & light
    split = [opened.eqns[i] for i in _in_the_loop(opened, found)]
    if any(class_of(eqn) is not Class.VIEW for eqn in split):
        return found
    mixes = lambda i, eqn: any(found.values[v].late == i for v in eqn.outvars)
    mixer = next((i for i, eqn in enumerate(opened.eqns) if mixes(i, eqn)), -1)
    return Mixing(mixer, why="" if mixer >= 0 else "nothing in it is done sample by sample")


def _in_the_loop(opened: Any, found: Batch) -> list[int]:
    """The equations that run once for each sub-batch; what leads to early ones alone does not."""
    need = {a for a in opened.outvars if isinstance(a, Var)}
    split = []
    for i in reversed(range(len(opened.eqns))):
        eqn = opened.eqns[i]
        if i in found.early or not any(v in need for v in eqn.outvars):
            continue
        need.update(a for a in eqn.invars if isinstance(a, Var))
        if found.is_split(i, eqn):
            split.append(i)
    return split[::-1]


def follow_body(body: Any, values: Sequence[Value], size: int) -> Batch:
    """The same for the body of a loop, whose arguments are `values`; nothing in it is early."""
    opened = compat.open_jaxpr(body)
    given = dict(zip(opened.invars, values, strict=True))
    given.update((v, _constant(c)) for v, c in _constants(body))
    return _follow(opened.eqns, given, size, frozenset())


def follow_slices(flat: ClosedJaxpr, at: int, made: Sequence[Value], size: int) -> Batch:
    """The analysis of the equations of `flat` behind equation `at`, with the slices of its results as
    samples. Values made before it are the same for all slices, and nothing is early.

    Args:
      made: the abstract values of its results.
      size: the number of slices.
    """
    opened = compat.open_jaxpr(flat)
    before, behind = opened.eqns[: at + 1], opened.eqns[at + 1 :]
    same = (*opened.invars, *opened.constvars, *(v for eqn in before for v in eqn.outvars))
    given = dict.fromkeys(same, SAME)
    given.update(zip(opened.eqns[at].outvars, made, strict=True))
    found = _follow(behind, given, size, frozenset())
    none: list[Sequence[Where]] = [[None] * len(eqn.invars) for eqn in before]
    rows = {at + 1 + i: column for i, column in found.rows.items()}
    return dataclasses.replace(found, wants=[*none, *found.wants], rows=rows)


def _constants(closed: Any) -> list[tuple[Var, Any]]:
    return [*zip(compat.open_jaxpr(closed).constvars, compat.constants(closed), strict=True)]


def _constant(value: Any) -> Value:
    plain = isinstance(value, np.ndarray | np.generic)
    return Value(zero=plain and not np.any(value))


def _literal(atom: Literal) -> Value:
    return Value(zero=not np.any(atom.val))  # a float0, of which `==` knows nothing, is zero too


_SORTS = frozenset("sort top_k cumsum cumprod cummax cummin cumlogsumexp".split())
"""Kernels of their own, but no more work than an elementwise one: metrics have them."""


def _is_heavy(eqn: JaxprEqn) -> bool:
    return class_of(eqn) is Class.HEAVY and eqn.primitive.name not in _SORTS


def _light(eqns: Sequence[JaxprEqn], found: Batch) -> set[int]:
    """Equations that no heavy work on samples leads up to."""
    dark: set[Var] = set()
    light = set()
    for i, eqn in enumerate(eqns):
        own = found.is_on_samples(eqn) and _is_heavy(eqn)
        if own or any(isinstance(a, Var) and a in dark for a in eqn.invars):
            dark.update(eqn.outvars)
        else:
            light.add(i)
    return light


def _follow(
    eqns: Sequence[JaxprEqn], given: Mapping[Var, Value], size: int, early: frozenset[int]
) -> Batch:
    values = dict(given)
    wants: list[Sequence[Where]] = []
    rows: dict[int, int] = {}
    maker: dict[Var, JaxprEqn] = {}
    for i, eqn in enumerate(eqns):
        read = [_literal(a) if isinstance(a, Literal) else values[a] for a in eqn.invars]
        outs, want = _step(i, eqn, read, size, early)
        known = i not in early and all(v.late < 0 and v.summed < 0 for v in read)
        own = own_rows(eqn, [v.layout for v in read], size, maker) if known else None
        if own is not None and any(v.layout is not None for v in read):
            (layouts, want), rows[i] = own
            outs = [Value(layout) for layout in layouts]
        if any(v.late >= 0 for v in outs):
            mixed = any(v.mixed for v in read) or _mixes(i, eqn, read, outs)
            sizes = [getattr(v.aval, "size", 0) for v in eqn.outvars]
            outs = [
                dataclasses.replace(v, mixed=mixed and v.layout is None and n >= size)
                for v, n in zip(outs, sizes, strict=True)
            ]
        wants.append(want)
        maker.update((v, eqn) for v in eqn.outvars)
        values.update(zip(eqn.outvars, outs, strict=True))
    return Batch(size, values, wants, early, rows)


def _mixes(i: int, eqn: JaxprEqn, read: Sequence[Value], outs: Sequence[Value]) -> bool:
    """Whether equation `i` itself mixes samples, other than by reducing them to one value."""
    reduces = eqn.primitive.name.startswith(("reduce_", "argm"))
    return (
        not reduces
        and any(v.layout is not None for v in read)
        and (any(v.late == i or v.layout is None for v in outs))
    )


def _step(
    i: int, eqn: JaxprEqn, read: Sequence[Value], size: int, early: frozenset[int]
) -> tuple[Sequence[Value], Sequence[Where]]:
    """The abstract values of the results of equation `i`, and the layouts its operands must have."""
    count, none = len(eqn.outvars), [None] * len(read)
    if i in early:
        return [SAME] * count, none
    if all(v.is_same for v in read):
        return [Value(zero=_is_zero(eqn, read))] * count, none
    at = [v.layout for v in read]
    late = min((v.late for v in read if v.late >= 0), default=-1)
    if eqn.primitive.name == "scan" and late < 0:
        scan = follow_scan(eqn, read, size)
        if scan is None:
            return [Value(late=i)] * count, none
        outs = [dataclasses.replace(v, summed=i if v.summed >= 0 else -1) for v in scan.outs]
        return outs, scan.wants
    sums = [v.summed for v in read if v.summed >= 0]
    if late < 0 and sums:
        if not any(at) and is_linear(eqn, read):
            return [Value(summed=sums[0])] * count, none
        if _adds_up(eqn, read, size):
            return [Value(summed=sums[0])], [None, *at[1:]]
        late = sums[0]
    found = ruled(eqn, at, size) if any(at) else None
    if late >= 0:
        layouts = [None] * count if found is None else found[0]
        return [Value(None if x == SUMMED else x, late=late) for x in layouts], none
    if found is None:
        return [Value(late=i)] * count, none
    scatters = eqn.primitive.name.startswith("scatter")
    if scatters and SUMMED in found[0] and not read[0].zero:
        return [Value(late=i)] * count, none  # what is added to counts once
    outs = [Value(summed=i) if x == SUMMED else Value(x) for x in found[0]]
    if any(v.summed >= 0 for v in outs) and not _is_number(eqn.outvars[0].aval):
        return [Value(late=i)] * count, none
    return outs, found[1]


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan by samples.

    Attributes:
      outs: the abstract values of its results.
      wants: the layouts that its operands must have.
      closed: its body without calls.
      body: the analysis of its body.
    """

    outs: Sequence[Value]
    wants: Sequence[Where]
    closed: Any
    body: Batch


def follow_scan(eqn: JaxprEqn, read: Sequence[Value], size: int) -> Scan | None:
    """The analysis of a scan with operands `read`; None if it mixes samples."""
    consts, carry = compat.scan_counts(eqn)
    start = [dataclasses.replace(v) for v in read[: consts + carry]]
    slices = []
    for v in read[consts + carry :]:
        if v.layout is not None and v.layout.dim == 0:
            return None  # a loop over the samples themselves
        inner = None if v.layout is None else v.layout.at(v.layout.dim - 1)
        slices.append(dataclasses.replace(v, layout=inner))
    carried = start[consts:]
    closed = inline(eqn.params["jaxpr"])
    while True:
        body = follow_body(closed, [*start[:consts], *carried, *slices], size)
        outs = [body.of(a) for a in compat.open_jaxpr(closed).outvars]
        if any(v.late >= 0 for v in body.values.values()):
            return None
        joined = [_join(a, b) for a, b in zip(carried, outs[:carry], strict=True)]
        if any(v is None for v in joined):
            return None
        if joined == carried:
            break
        carried = [v for v in joined if v is not None]
    made = compat.open_jaxpr(closed).outvars[carry:]
    parts = _by_samples(body, closed)
    outs[carry:] = [Value(parts[a]) if a in parts else body.of(a) for a in made]
    stacked = [
        dataclasses.replace(v, layout=None if v.layout is None else v.layout.at(v.layout.dim + 1))
        for v in outs[carry:]
    ]
    wants: list[Where] = [None] * consts
    wants += [v.layout for v in carried]
    wants += [v.layout for v in read[consts + carry :]]
    both = zip((v.layout for v in read), wants, strict=True)
    return Scan([*carried, *stacked], [want or own for own, want in both], closed, body)


def _by_samples(body: Batch, closed: Any) -> dict[Any, Layout]:
    """How the work on samples reads values that are the same for all of them: a dropout mask, or the
    bits of one, that a sub-batch makes or cuts out for its samples alone."""
    found: dict[Any, set[Layout]] = {}
    eqns = compat.open_jaxpr(closed).eqns
    for eqn, wants in reversed([*zip(eqns, body.wants, strict=True)]):
        layouts = found.get(eqn.outvars[0], set()) if len(eqn.outvars) == 1 else set()
        if len(layouts) == 1:
            [layout] = layouts
            wants = wanted(eqn, layout, body.size) or ()
        for a, want in zip(eqn.invars, wants, strict=False):
            if isinstance(a, Var) and want is not None and body.of(a).is_same:
                found.setdefault(a, set()).add(want)
    return {a: layouts.pop() for a, layouts in found.items() if len(layouts) == 1}


def _join(a: Value, b: Value) -> Value | None:
    """The abstract value of a carried value that is `a` before an iteration and `b` after it."""
    if a.layout is not None or b.layout is not None:
        if a.layout is not None and b.layout not in (None, a.layout):
            return None
        if a.summed >= 0 or b.summed >= 0:
            return None
        return Value(a.layout or b.layout)
    if a.summed >= 0 or b.summed >= 0:
        both = (a.summed >= 0 or a.zero) and (b.summed >= 0 or b.zero)
        return Value(summed=0) if both else None
    return Value(zero=a.zero and b.zero)


_KEEP_ZERO = frozenset(
    "broadcast_in_dim convert_element_type copy reshape transpose squeeze expand_dims neg slice rev "
    "reduce_sum".split()
)


def _is_zero(eqn: JaxprEqn, read: Sequence[Value]) -> bool:
    if eqn.primitive.name not in _KEEP_ZERO:
        return False
    return read[0].zero


def _is_number(aval: Any) -> bool:
    """Whether addition of such values is a sum (not of truth values, not of keys)."""
    return jnp.issubdtype(aval.dtype, jnp.number)


def _adds_up(eqn: JaxprEqn, read: Sequence[Value], size: int) -> bool:
    """Whether an equation adds more of the samples to a sum over them: a scatter into it."""
    if not eqn.primitive.name.startswith("scatter") or read[0].summed < 0:
        return False
    if any(v.summed >= 0 for v in read[1:]):
        return False
    found = ruled(eqn, [None, *(v.layout for v in read[1:])], size)
    return found is not None and found[0][0] == SUMMED


_UNARY = frozenset(
    "broadcast_in_dim copy reshape transpose squeeze expand_dims neg slice rev reduce_sum cumsum "
    "real imag reduce_window_sum optimization_barrier unstack".split()
)


def is_linear(eqn: JaxprEqn, read: Sequence[Value]) -> bool:
    """Whether the results of `eqn` are linear in the sums that it reads, the rest being the same."""
    name = eqn.primitive.name
    counts = [v.summed >= 0 or v.zero for v in read]  # linear in it, or zero
    sums = [v.summed >= 0 for v in read]
    inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    if name in _UNARY or name in ("add", "add_any", "sub", "concatenate", "stack"):
        return all(counts)
    if name in ("convert_element_type", "reduce_precision"):
        was = eqn.invars[0].aval.dtype
        return inexact or (
            jnp.issubdtype(was, jnp.integer)
            and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer)
        )
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return sum(sums) == 1
    if name == "div":
        return sums[0] and not sums[1] and inexact
    if name == "select_n":
        return not sums[0] and all(counts[1:])
    if name == "dynamic_slice":
        return not any(sums[1:])
    if name == "gather":  # what is out of bounds is NaN, or zero
        return inexact and not sums[1] and eqn.params["fill_value"] in (None, 0)
    if name == "pad":
        return all(counts)
    if name == "dynamic_update_slice":
        return all(counts[:2]) and not any(sums[2:])
    if name in ("scatter-add", "scatter_add"):
        return counts[0] and counts[2] and not sums[1]
    return False
