"""transposes: which values XLA:GPU transposes in passes of their own for batched products.

A batched product reads and makes arrays whose batch dimensions lie together, outside of the rows or
between rows and columns. So heads of attention, [samples, tokens, heads, size], are transposed in
front of its products and behind them. A chain that computes something does that where it reads or
writes. Between two library kernels, and where heads are only cut out of one array or put together
into one, it is a pass of its own: XLA (0.11.2) transposes queries, keys and values as one array and
then copies each out of it. An H200 takes 90 us for that where one pass over them takes 38 (ViT-L,
64 images), and 103 us to put the three gradients together. Each product that reads what another one
makes transposes it anew: what is attended once for the output and once for the output's weight
gradient, and its cotangent for the gradients to the weights of attention and to the values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from vmem_jax.capture.def_use import readers
from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import Atom, JaxprEqn, Var

_MOVES = frozenset("concatenate dynamic_slice slice split stack unstack".split())
"""What copies its operands, and computes nothing."""

_VECTOR = 16
"""Bytes of the vectors that rows are moved in."""


@dataclasses.dataclass(frozen=True)
class _Run:
    """Neighbouring elements of a value along one dimension or a part of one.

    Attributes:
      size: elements, more than 1.
      batch: whether they belong to different products of a batch.
    """

    size: int
    batch: bool


Runs = tuple[_Run, ...]
"""The dimensions of a value from the slowest to the fastest, or parts of them."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """How a value is transposed.

    Attributes:
      count: passes over it.
      aligned: whether its rows are whole vectors then.
    """

    count: int
    aligned: bool


def transposed(eqns: Sequence[JaxprEqn]) -> dict[Var, Passes]:
    """The values that are transposed in passes of their own.

    Args:
      eqns: of a flat jaxpr.
    """
    walk = _Walk(eqns)
    found: dict[Var, Passes] = {}
    for eqn in eqns:
        if eqn.primitive.name != "dot_general" or not any(eqn.params["dimension_numbers"][1]):
            continue
        _, batches = eqn.params["dimension_numbers"]
        for a, batch in zip(eqn.invars, batches, strict=True):
            if isinstance(a, Var):
                walk.back(a, _runs(_shape(a), batch), found)
        [out] = eqn.outvars
        runs = _runs(_shape(out), range(len(batches[0])))
        if count := walk.passes_behind(out, runs):
            found[out] = Passes(count, _is_aligned(out, runs))
    return found


def moves_elements(eqn: JaxprEqn) -> bool:
    """Whether transpose `eqn` moves elements in memory: not if it moves dimensions of one alone."""
    shape = getattr(eqn.invars[0].aval, "shape", ())
    long = [d for d in eqn.params["permutation"] if shape[d] > 1]
    return long != sorted(long)


def moves_rows(eqn: JaxprEqn) -> bool:
    """Whether transpose `eqn` is more than that of a matrix, which a product reads as it lies: its
    operand's dimensions, those that stay neighbours as one, are three or more."""
    shape = getattr(eqn.invars[0].aval, "shape", ())
    order = [d for d in eqn.params["permutation"] if shape[d] > 1]
    ranks = {d: n for n, d in enumerate(sorted(order))}
    breaks = sum(ranks[b] != ranks[a] + 1 for a, b in itertools.pairwise(order))
    return breaks >= 2


def _runs(shape: Sequence[int], batch: Sequence[int]) -> Runs:
    return tuple(_Run(n, d in batch) for d, n in enumerate(shape) if n > 1)


def _shape(v: Var) -> tuple[int, ...]:
    aval: Any = v.aval
    return tuple(aval.shape)


def _fits(runs: Runs) -> bool:
    """Whether a product can read or make such an array: its batch dimensions lie together, and others
    are faster."""
    at = [i for i, run in enumerate(runs) if run.batch]
    return not at or (at[-1] - at[0] == len(at) - 1 and at[-1] < len(runs) - 1)


def _is_aligned(v: Var, runs: Runs) -> bool:
    aval: Any = v.aval
    itemsize = int(aval.dtype.itemsize)
    return all(run.size * itemsize % _VECTOR == 0 for run in runs if not run.batch)


def _regrouped(runs: Runs, shape: Sequence[int]) -> list[Runs] | None:
    """`runs` by the dimensions of `shape`, of as many elements; None if these do not end together."""
    waiting, found = [*runs], []
    for n in shape:
        own: list[_Run] = []
        while n > 1:
            if not waiting:
                return None
            run = waiting.pop(0)
            common = math.gcd(n, run.size)
            if common not in (n, run.size):
                return None
            if common < run.size:  # the slower part of the run is this dimension
                waiting.insert(0, _Run(run.size // common, run.batch))
            own.append(_Run(common, run.batch))
            n //= common
        found.append(tuple(own))
    return found


def _joined(groups: Sequence[Runs]) -> Runs:
    return tuple(run for group in groups for run in group)


class _Walk:
    """Follows the values of a jaxpr through what only views them."""

    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self.maker: Mapping[Var, JaxprEqn] = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.readers = {v: [eqns[i] for i in read] for v, read in readers(eqns).items()}

    def back(self, v: Var, runs: Runs, found: dict[Var, Passes]) -> None:
        """Adds to `found` the value behind operand `v` of a product, if it is transposed."""
        eqn = self.maker.get(v)
        while eqn is not None and class_of(eqn) is Class.VIEW and isinstance(eqn.invars[0], Var):
            inner = eqn.invars[0]
            if eqn.primitive.name == "layout_constraint":
                return  # what makes it writes it so
            if eqn.primitive.name == "transpose":
                groups = _regrouped(runs, _shape(v))
                if groups is None:
                    return
                order = eqn.params["permutation"]
                runs = _joined([groups[order.index(d)] for d in range(len(order))])
            v, eqn = inner, self.maker.get(inner)
        if eqn is None or _fits(runs):
            return
        if eqn.primitive.name == "dot_general":
            before = found[v].count if v in found else 0
            found[v] = Passes(before + 1, _is_aligned(v, runs))
        elif eqn.primitive.name in _MOVES and self._is_given(eqn):
            found[v] = Passes(1, _is_aligned(v, runs))

    def _is_given(self, eqn: JaxprEqn) -> bool:
        """Whether all that `eqn` moves is given by kernels of their own, with nothing computed in
        between."""
        for a in eqn.invars:
            maker = self.maker.get(a) if isinstance(a, Var) else None
            while maker is not None and (
                class_of(maker) is Class.VIEW or maker.primitive.name in _MOVES
            ):
                first: Atom = maker.invars[0]
                maker = self.maker.get(first) if isinstance(first, Var) else None
            if maker is not None and class_of(maker) is not Class.HEAVY:
                return False
        return True

    def passes_behind(self, v: Var, runs: Runs) -> int:
        """How often `v` is transposed for library kernels, and for what only moves it, that read it
        with its batch dimensions apart: never if something that computes reads it, other than a
        sum."""
        waiting: list[tuple[Var, Runs]] = [(v, runs)]
        kernels, moved = 0, False
        while waiting:
            v, runs = waiting.pop()
            for eqn in self.readers.get(v, ()):
                kind, name = class_of(eqn), eqn.primitive.name
                if name == "layout_constraint":
                    continue  # a chain writes it so
                if kind is Class.VIEW:
                    if name == "transpose":
                        groups = _regrouped(runs, _shape(v))
                        if groups is None:
                            continue
                        turned = _joined([groups[d] for d in eqn.params["permutation"]])
                        waiting.append((eqn.outvars[0], turned))
                    else:
                        waiting.append((eqn.outvars[0], runs))
                elif name in _MOVES:
                    if any(map(self._is_computed_with, eqn.outvars)):
                        return 0
                    moved |= not _fits(runs)
                elif kind is Class.HEAVY:
                    kernels += not _fits(runs)
                elif kind is not Class.REDUCE:
                    return 0
        return kernels + moved

    def _is_computed_with(self, v: Var) -> bool:
        """Whether a chain computes something of `v`, through views and moves."""
        for eqn in self.readers.get(v, ()):
            if class_of(eqn) is Class.VIEW or eqn.primitive.name in _MOVES:
                if any(map(self._is_computed_with, eqn.outvars)):
                    return True
            elif class_of(eqn) is not Class.HEAVY:
                return True
        return False
