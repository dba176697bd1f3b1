"""fused_reads: what a chain of fusible equations reads, and what it computes again.

A value in a chain is read where it exists, or computed from its operands, whichever costs fewer
bytes: those that are moved, and those that are held until the chain runs. What computing a value
costs is what needing its operands costs, so one decision asks for others, back through the program. A
price is worked out only as far as a decision depends on it: behind a residual stream lies the whole
network, and reading the stream costs less than the last layers of that alone.

A value that is only converted to a wider type exists in the narrow one, and each reader converts it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from vmem_jax.capture.primitives import Class
from vmem_jax.jax_compat import Atom, JaxprEqn, Var

_MOST_VISITS = 500
"""Values priced for one kernel; beyond it a value exists. XLA's fusions end too."""

_STREAM_READS = 2
"""So many readers of a sum make it a stream: a norm, and the next sum."""

_EPOCHS_PER_PASS = 8
"""Holding a value over so many heavy kernels counts as much as reading it once."""


class Values(Protocol):
    """What is known of the values of a jaxpr.

    Attributes:
      eqns, classes: its equations, and how XLA treats each.
      epoch: how many heavy kernels stand before each.
      maker: of a value the equation that makes it; none of an input.
      operands: of an equation the values that it reads, inputs first and then the latest first: what
        was made long ago is what most stands behind.
      readers: of a value the equations that read it, in order.
      nbytes: of a value.
      exists: fusible values that some kernel must write.
      until: of an existing value the last epoch that reads it.
      at_once: reductions that are computed in every kernel which reads their rows (`softmax`).
      narrow: of a value what it is converted from, where that has fewer bytes and may be read in its
        place.
      wide_uses: of a value how often it is read; what reads it in a wider type counts, the conversion
        does not.
    """

    eqns: list[JaxprEqn]
    classes: list[Class]
    epoch: list[int]
    maker: dict[Var, int]
    operands: list[list[Var]]
    readers: dict[Var, list[int]]
    nbytes: dict[Var, int]
    exists: set[Var]
    until: dict[Var, int]
    at_once: set[int]
    narrow: dict[Var, Var]
    wide_uses: dict[Var, int]

    def must_exist(self, v: Var) -> bool:
        """Whether `v` is in memory whatever is decided."""


def narrowed(
    eqns: Sequence[JaxprEqn], classes: Sequence[Class], nbytes: Mapping[Var, int]
) -> dict[Var, Var]:
    """`Values.narrow` of these equations, in their order."""
    found = {}
    for eqn, kind in zip(eqns, classes, strict=True):
        if kind is Class.FUSIBLE and eqn.primitive.name == "convert_element_type":
            [operand], [result] = eqn.invars, eqn.outvars
            if isinstance(operand, Var) and nbytes[operand] < nbytes[result]:
                found[result] = operand
    return found


def uses_in_wide(uses: Mapping[Var, int], narrow: dict[Var, Var]) -> dict[Var, int]:
    """`Values.wide_uses`, where values are read `uses` times, conversions included."""
    found = dict(uses)
    for wide, source in reversed(narrow.items()):  # the last conversion of several first
        found[source] += found.get(wide, 0) - 1
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """What reading a value costs, which depends on what computing it costs where somebody has to.

    Attributes:
      read: bytes that reading it moves and holds.
      write: bytes that writing it adds.
      uses: readers that share what computing it costs; infinitely many where none pays for that.
      exists: whether it exists in any case.
    """

    read: float
    write: float = 0.0
    uses: float = math.inf
    exists: bool = False

    @property
    def even(self) -> float:
        """The price of computing the value at which reading it costs as much."""
        return math.inf if self.uses == 1 else (self.read + self.write) / (1 - 1 / self.uses)

    def limit(self, most: float | None) -> float:
        """The highest price of computing the value that matters to `choice`."""
        if most is None:
            return self.even
        if most <= self.even:
            return most
        return self.even if math.isinf(self.uses) else (most - self.read - self.write) * self.uses

    def choice(
        self, compute: float, limit: float, most: float | None
    ) -> tuple[bool | None, float | None]:
        """(whether to read the value, the lower price), each None if it is unknown.

        Args:
          compute: the price of computing it; infinite where that is above `limit`.
          limit: at least `self.limit(most)`.
          most: bytes up to which the price matters; None if it does not.
        """
        is_read, price = None, None
        if math.isfinite(compute):
            reading = self.read + (self.write + compute / self.uses)
            is_read = compute >= reading if self.exists else compute > reading
            price = min(compute, reading)
        elif limit >= self.even:
            is_read = True
            price = self.read + self.write if math.isinf(self.uses) else None
        if price is not None and most is not None and price > most:
            price = None
        return is_read, price


class Walk:
    """One walk from the operands of a chain's root back to the values that it reads.

    Args:
      epoch: of the root.
      free: values that the chain reads anyway.

    Attributes:
      reads: the values that it reads.
      inlined: the equations that it computes.
      weighs: whether any of this depends on prices.
    """

    def __init__(self, values: Values, epoch: int, free: Iterable[Var]) -> None:
        self.values = values
        self.epoch = epoch
        self.until = values.until
        self.free = {v for v in free if v in values.exists or values.must_exist(v)}
        self.prices: dict[Var, float] = {}  # value -> bytes that needing it here costs
        self.above: dict[Var, float] = {}  # value -> bytes that its price is known to exceed
        self.is_read: dict[Var, bool] = {}  # value -> whether to read it (or compute it)
        self.weighs = False
        self.reads: dict[Var, None] = {}
        self.inlined: set[int] = set()

    def visit_all(self, atoms: Iterable[Atom]) -> None:
        for atom in atoms:
            self.visit(atom, 0)

    def visit(self, atom: Atom, depth: int) -> None:
        """Adds what computing `atom` reads and inlines."""
        if not isinstance(atom, Var):
            return
        if self._reads(atom, depth):
            self.reads[atom] = None
            return
        i = self.values.maker[atom]
        if i not in self.inlined:
            self.inlined.add(i)
            for operand in self.values.eqns[i].invars:
                self.visit(operand, depth + 1)

    def _reads(self, v: Var, depth: int) -> bool:
        """Whether to read `v` here, or to compute it."""
        if v not in self.is_read and not self._is_given(v, depth):
            # who writes it would be its only reader, or it is widened
            stays = self.values.wide_uses.get(v, 0) < 2 or v in self.values.narrow
            if stays and v not in self.values.exists:
                self.is_read[v] = False
            else:
                self.weighs = True
                self._choose(v, depth, None)
        return self.is_read[v]

    def _price(self, v: Var, depth: int, most: float) -> float:
        """The price in bytes of needing `v` here; infinite where it exceeds `most`."""
        if v not in self.prices and not self._is_given(v, depth):
            above = self.above.get(v, 0.0)
            if v not in self.values.exists and (narrow := self.values.narrow.get(v)):
                return self._price(narrow, depth + 1, most)
            if above < most or not above:
                # a value that is asked for again goes twice as far, so that this is not often
                self._choose(v, depth, max(most, 2 * above))
        return self.prices.get(v, math.inf)

    def _is_given(self, v: Var, depth: int) -> bool:
        """Whether `v` is read without a choice; if so, notes its price."""
        i = self.values.maker.get(v)
        if i in self.values.at_once and v not in self.values.exists:
            self.prices[v], self.is_read[v] = 0.0, False  # the kernel has its rows anyway
            return True
        if v in self.free:
            price = 0.0
        elif i is None:  # an input of the program: always there
            price = float(self.values.nbytes[v])
        elif self.values.classes[i] in (Class.HEAVY, Class.REDUCE):
            price = self._read_nbytes(v, i)
        elif len(self.prices) + len(self.above) > _MOST_VISITS or depth > 100:
            price = self._read_nbytes(v, i)
        else:
            return False
        self.prices[v], self.is_read[v] = price, True
        return True

    def _read_nbytes(self, v: Var, i: int, reader: int | None = None) -> float:
        """Bytes moved and held by reading `v`, which equation `i` makes. If equation `reader` of a
        backward pass reads it, it is held until then whichever kernel computes that."""
        born = self.values.epoch[i]
        if reader is not None and self.values.epoch[reader] - born > _EPOCHS_PER_PASS:
            born = self.values.epoch[reader]
        outlives = max(0, self.epoch - max(self.until.get(v, born), born))
        return self.values.nbytes[v] * (1 + outlives / _EPOCHS_PER_PASS)

    def _choose(self, v: Var, depth: int, most: float | None) -> None:
        """Notes whether to read `v` or to compute it, and its price, that of the cheaper one.

        Args:
          most: bytes up to which the price matters; None where only the choice does.
        """
        # whether it is a stream is asked only where that matters, since the answer depends on the
        # same question for what it is made of
        first, *other = readings = self._readings(v)
        limit = max(each.limit(most) for each in readings)
        compute = self._compute_price(v, depth, limit)
        is_read, price = first.choice(compute, limit, most)
        if other:
            choice = other[0].choice(compute, limit, most)
            if most is None and is_read == choice[0]:
                price = price if price == choice[1] else None
            elif (is_read, price) != choice and not self._joins(v):
                is_read, price = choice
        if is_read is not None:
            self.is_read[v] = is_read
        if price is not None:
            self.prices[v] = price
        elif most is not None:
            self.above[v] = most

    def _readings(self, v: Var) -> list[_Reading]:
        """What reading `v` takes; where it may be a stream both readings, that of a stream first."""
        values, i = self.values, self.values.maker[v]
        read, nbytes, uses = self._read_nbytes(v, i), values.nbytes[v], values.wide_uses.get(v, 0)
        if v in values.exists:
            return [_Reading(read, exists=True)]
        # somebody has to compute and write it first
        readings = [_Reading(read, nbytes, max(uses, 1))]
        if uses >= _STREAM_READS and self._is_sum(v):
            # it is written once, and then read in place of its operands
            operands = sum(values.nbytes[a] for a in values.operands[i])
            readings.insert(0, _Reading(read, (nbytes + operands) / uses))
        return readings

    def _compute_price(self, v: Var, depth: int, most: float) -> float:
        """The price in bytes of needing all operands of `v`; infinite where it exceeds `most`."""
        most *= 1 + 1e-9  # a sum that is equal but for rounding is worked out
        total, i = 0.0, self.values.maker[v]
        stack = self._stack(self.values.eqns[i])
        for a in self.values.operands[i]:
            made = self.values.maker.get(a)
            if a is stack:  # of one that is there the slice alone is read
                total += self.values.nbytes[v]
            elif made is not None and a not in self.free and self.values.must_exist(a):
                total += self._read_nbytes(a, made, i)
            else:
                total += self._price(a, depth + 1, most - total)
            if total > most:
                return math.inf
        return total

    def _stack(self, eqn: JaxprEqn) -> Atom | None:
        """What `eqn` reads an iteration's slice of, if that exists whatever is decided."""
        if eqn.primitive.name != "dynamic_slice" or not isinstance(eqn.invars[0], Var):
            return None
        i = self.values.maker.get(eqn.invars[0])
        there = i is None or self.values.classes[i] in (Class.HEAVY, Class.REDUCE)
        return eqn.invars[0] if there else None

    def _joins(self, v: Var) -> bool:
        """Whether computing the sum `v` reads two values as large as itself or more: a residual
        stream behind what is added to it."""
        found: set[Var] = set()
        stack, seen = [v], {v}
        while stack and len(found) < 2 and len(seen) < _MOST_VISITS:
            for a in self.values.operands[self.values.maker[stack.pop()]]:
                if a in seen:
                    continue
                seen.add(a)
                if self._reads(a, 0):
                    if self.values.nbytes[a] >= self.values.nbytes[v]:
                        found.add(a)
                else:
                    stack.append(a)
        return len(found) > 1

    def _is_sum(self, v: Var) -> bool:
        """Whether `v` is a sum of two values, or one in another type or shape."""
        while len((eqn := self.values.eqns[self.values.maker[v]]).invars) == 1:
            [a] = eqn.invars
            if not isinstance(a, Var) or a not in self.values.maker:
                break
            v = a
        is_add = eqn.primitive.name in ("add", "add_any")
        return is_add and all(isinstance(a, Var) for a in eqn.invars)
