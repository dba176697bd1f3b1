"""softmax: rows that XLA:GPU normalises in a Triton kernel, and their reductions.

XLA (0.11.2) has a pass for what is computed of rows and of what these reduce to. Where such a row
fits in a tile, the kernel that reads the row reduces it, too: the probabilities of an attention are
made of the scores in one pass, and so is the gradient to the scores, of them and of the gradient to
the probabilities. Their maxima and sums need not exist, and are taken again in every such kernel
(`reduced_at_once`), unless rows share what is read: such kernels take up to eight times as long.
Plain jit takes the sums once more in a pass of their own, which AD saves for the backward pass
(`as_summed_apart`).

Of a softmax whose exponentials a loop stacks, the kernel takes the maxima and writes the
exponentials, in float32. No other kernel computes them again, and they are copied into the stack:
those of ViT-L(64), 152 MiB, are there beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from vmem_jax.capture.fused_reads import Values
from vmem_jax.capture.primitives import ELEMENTWISE, Class, class_of
from vmem_jax.capture.shards import Shards
from vmem_jax.capture.transposes import moves_elements
from vmem_jax.core.costs import Costs
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Phase, Program
from vmem_jax.jax_compat import Atom, JaxprEqn, Var

_SPREADS = ("broadcast_in_dim", "convert_element_type", "max")
"""What stands between the maximum of a row and what is taken off it: `jax.nn.softmax` bounds it."""

_LONGEST = 2**14
"""Elements of a row that XLA reduces in the kernel which reads it, at most."""

_LONGEST_COUNTED = 2**10
"""The same where a mask is counted for each row. Of longer ones XLA makes one kernel or five."""

_TILE_ROWS = 8
"""Rows one behind another, of which the number is a multiple where XLA reduces them at once. Others
have tiles of rows that lie far apart: of 1,024 times 197 rows of 256 elements the gradient takes 203
us on an H200, and of 256 rows 103."""

_FULLEST = 0.96
"""Share of a tile, whose sides are powers of two, that such a row fills at least. Of rows of 0.95 and
less XLA makes one kernel or five, as it estimates their times by their number and length."""

_SHARED = 1.5
"""How many times longer plain jit's kernels of causal rows take: those of GPT-2 medium moved 2.2 to
2.9 TB/s on an H200, and rows that share nothing 3.1 to 3.9."""

_MOST_VISITS = 128
"""Values that are followed from a softmax, at most; behind more its reductions are apart."""

_MOST_REDUCTIONS = 6
"""Reductions of the same rows, at most: a softmax and its gradient take three, and AD adds one of a
single element."""


def makes_exponentials(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> bool:
    """Whether `eqn` makes the exponentials of rows less their maxima, as a softmax does."""
    return maxima(eqn, maker) is not None


def maxima(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn], may_choose: bool = False) -> Var | None:
    """The maxima of the rows whose exponentials `eqn` makes; None if it makes none.

    Args:
      may_choose: also of rows less their maxima where these are finite, as `logsumexp` has them.
    """
    spreads = (*_SPREADS, "select_n") if may_choose else _SPREADS
    less = maker_of(eqn.invars[0], maker) if eqn.primitive.name == "exp" else None
    if less is None or less.primitive.name != "sub":
        return None
    row, most = less.invars
    made = maker_of(most, maker)
    while made is not None and class_of(made) is not Class.REDUCE:
        if class_of(made) is not Class.VIEW and made.primitive.name not in spreads:
            return None
        most = made.invars[-1]
        made = maker_of(most, maker)
    if made is None or made.primitive.name != "reduce_max" or not reduces_rows(made):
        return None
    return most if _in_order(made.invars[0], maker) is _in_order(row, maker) else None


def _in_order(v: Atom, maker: Mapping[Var, JaxprEqn]) -> Atom:
    """What has the elements of `v` in the same order, and is no view of another value."""
    made = maker_of(v, maker)
    while made is not None and class_of(made) is Class.VIEW and _keeps_order(made):
        [source, *_] = made.invars
        if math.prod(source.aval.shape) != math.prod(v.aval.shape):
            break
        v, made = source, maker_of(source, maker)
    return v


def maker_of(a: Atom, maker: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """The equation that makes `a`; None of a number, and of what `maker` does not have."""
    return maker.get(a) if isinstance(a, Var) else None


def fits(shape: Sequence[int], counted: bool = False) -> bool:
    """Whether XLA reduces rows of an array of `shape` in every kernel that reads them.

    Args:
      counted: whether a mask is counted for each row.
    """
    *_, rows, length = (1, *_long(shape[:-1]), *shape[-1:])
    longest = _LONGEST_COUNTED if counted else _LONGEST
    is_full = length >= _FULLEST * 2 ** (length - 1).bit_length()
    return 1 < length <= longest and is_full and rows % _TILE_ROWS == 0


def reduced_at_once(
    values: Values, maker: Mapping[Var, JaxprEqn], outputs: Collection[Var], shards: Shards
) -> Iterator[int]:
    """The reductions of softmaxes that are computed in every kernel which reads them.

    Args:
      maker: the equation that makes each value.
      outputs: of the jaxpr.
      shards: how its values are split over devices.
    """
    for eqn in values.eqns:
        if (most := maxima(eqn, maker)) is None:
            continue
        [rows] = eqn.outvars
        shape = rows.aval.shape
        if fits(shape) and not shards.is_split(rows, len(shape) - 1):
            yield from _Rows(values, outputs, rows).reductions(values.maker[most])


class _Rows:
    """What is computed of the rows of one softmax.

    Args:
      exponentials: of the rows.
    """

    def __init__(self, values: Values, outputs: Collection[Var], exponentials: Var) -> None:
        self.values, self.outputs = values, outputs
        aval: Any = exponentials.aval
        self.shape, self.size = aval.shape, aval.size
        self.pending, self.seen = [exponentials], {exponentials}
        self.found: list[int] = []
        self.visits = 0
        self.alike: dict[Var, bool] = {}  # whether a value is of the rows, or of whole rows

    def reductions(self, most: int) -> list[int]:
        """All of them, equation `most` included; none if something else than a kernel which reads
        such rows reads one of them, if something reduces another dimension of the rows, or if
        several rows share what is read."""
        self.found.append(most)
        alone = self._are_spread(self.values.eqns[most].outvars[0])
        alone = alone and self._reads_alike(self.values.eqns[most])
        while alone and self.pending and len(self.found) <= _MOST_REDUCTIONS:
            alone = all(map(self._is_of_rows, self.values.readers.get(self.pending.pop(), ())))
        return self.found if alone and len(self.found) <= _MOST_REDUCTIONS else []

    def _is_of_rows(self, j: int) -> bool:
        """Whether equation `j`, which reads rows, stands alone, makes rows, or reduces them to what
        is spread over rows again."""
        eqn = self.values.eqns[j]
        if self.values.classes[j] is Class.HEAVY:
            return True
        [out, *_] = eqn.outvars
        if self._is_row(out) and _keeps_order(eqn):
            self._add(out)
            return self._reads_alike(eqn)
        if eqn.primitive.name != "reduce_sum" or not reduces_rows(eqn):
            return False
        if j not in self.found:
            self.found.append(j)
            return self._are_spread(out)
        return True

    def _are_spread(self, v: Var) -> bool:
        """Whether all that reads `v`, which has one element a row, makes rows in the end."""
        one_a_row: Any = v.aval
        self.visits += 1
        if v in self.outputs or self.visits > _MOST_VISITS:
            return False
        readers = self.values.readers.get(v, ())
        return all(self._spreads(j, one_a_row.size) for j in readers)

    def _spreads(self, j: int, size: int) -> bool:
        """Whether equation `j` makes rows, in the end, of a value of `size` elements, one a row."""
        eqn, kind = self.values.eqns[j], self.values.classes[j]
        if kind is Class.HEAVY:
            return False
        [out, *_] = eqn.outvars
        if out.aval.size == size:
            if kind is Class.REDUCE:  # of one element: it changes the shape alone
                self.found.append(j)
            return self._are_spread(out)
        if kind is Class.REDUCE or not self._is_row(out):
            return False
        self._add(out)
        return self._reads_alike(eqn)

    def _add(self, rows: Var) -> None:
        if rows not in self.seen:
            self.seen.add(rows)
            self.pending.append(rows)

    def _is_row(self, v: Var) -> bool:
        aval: Any = v.aval
        return aval.size == self.size and aval.shape[-1] == self.shape[-1]

    def _reads_alike(self, eqn: JaxprEqn) -> bool:
        """Whether `eqn` reads what each row has of its own, or numbers.

        XLA chooses tiles of 16 rows of 1,024 that share what is read, such as a causal mask: they
        are far apart, and have more values than there are registers. On an H200 such a softmax takes
        468 us in place of 148, and its gradient 859 in place of 282.
        """
        return all(self._is_alike(a) for a in eqn.invars if isinstance(a, Var))

    def _is_alike(self, v: Var) -> bool:
        if v not in self.alike:
            self.visits += 1
            self.alike[v] = self.visits <= _MOST_VISITS and self._is_made_alike(v)
        return self.alike[v]

    def _is_made_alike(self, v: Var) -> bool:
        aval: Any = v.aval
        if aval.size == 1 or _long(aval.shape) == _long(self.shape[:-1]):
            return True
        if not self._is_row(v):
            return False
        i = self.values.maker.get(v)
        if i is None or self.values.classes[i] in (Class.HEAVY, Class.REDUCE):
            return True
        eqn = self.values.eqns[i]
        if eqn.primitive.name == "broadcast_in_dim":
            [source, *_] = eqn.invars
            dims = zip(eqn.params["broadcast_dimensions"], source.aval.shape, strict=True)
            kept = [int(d) for d, n in dims if n > 1]
            every = [d for d, n in enumerate(aval.shape[:-1]) if n > 1]
            return source.aval.size == 1 or kept == every
        if eqn.primitive.name == "iota":
            return fits(self.shape, counted=True)
        return _keeps_order(eqn) and self._reads_alike(eqn)


def _keeps_order(eqn: JaxprEqn) -> bool:
    """Whether `eqn` makes each element of one in the same place: XLA makes no kernel of rows that are
    transposed on the way."""
    if eqn.primitive.name != "transpose":
        return class_of(eqn) is Class.VIEW or eqn.primitive.name in ELEMENTWISE
    return not moves_elements(eqn)


def _long(shape: Sequence[int]) -> list[int]:
    """`shape` without dimensions of one element, as `vmap` leaves them."""
    return [n for n in shape if n > 1]


def as_summed_apart(
    costs: Costs, program: Program, eqns: list[JaxprEqn], machine: Machine
) -> Costs:
    """`costs` of `program`, which reduces rows where they are read, for the step by plain jit: the
    forward pass reads the rows of each softmax once more, for their sums, and rows share a mask that
    is counted. Of scores in more bytes than the weights have it keeps the exponentials in their
    place: it writes these, too, and reads them.

    Args:
      eqns: those of the steps of `program`.
      machine: whose memory they are read from.
    """
    seconds = [*costs.seconds]
    for s, step in enumerate(program.steps):
        at_once = step.fusible and step.aligned
        inside = [eqns[i] for i in step.equations[:-1]] if at_once else []
        if not any(e.primitive.name == "reduce_max" and reduces_rows(e) for e in inside):
            continue
        rows = max((program.buffers[b].nbytes for b in step.reads), default=0)
        made = max((program.buffers[b].nbytes for b in step.writes), default=0)
        if any(eqn.primitive.name == "iota" for eqn in inside):
            seconds[s] *= _SHARED
        if step.phase is Phase.FORWARD:
            seconds[s] += (3 if rows > made else 1) * rows / machine.bandwidth
    return dataclasses.replace(costs, seconds=tuple(seconds))


def reduces_rows(eqn: JaxprEqn) -> bool:
    """Whether the reduction `eqn` is one over the last dimension."""
    return eqn.params["axes"] == (eqn.invars[0].aval.ndim - 1,)
