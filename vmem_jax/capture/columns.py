"""columns: what sums over rows take.

XLA:GPU (0.11.2) sums over rows in blocks of 1,024 threads, each block all rows of 32 columns; of more
than 4,096 rows it makes parts first, which a second kernel sums. Two blocks fit a multiprocessor, so
132 of these run 264 blocks at once, and where fewer are left each still takes its time. An H200 sums
16,384 rows and more of bfloat16 at 3.3 TB/s (`benchmarks/rates.py`), but in a U-Net's step 16 times
4,096 rows of 640 columns, which are 320 blocks, at 2.1, and 4,096 rows of 1,280, 40 blocks, at 0.6.

So a rewritten step on one GPU makes sums of fewer rows in parts itself (`rewrite.column_sums`), where
that is worth a kernel more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import JaxprEqn

_COLUMNS, _MOST_ROWS = 32, 4096
"""Of a block."""

_AT_ONCE = 264
"""Blocks that run at once on an H100 or an H200."""

OPERATIONS = 30
"""Operations that take as long as such a block reads or writes an element, with all others beside
it: 3.3 TB/s of bfloat16."""


_LEAST_ROWS = 32
"""Of a part, one for each row of a block's threads."""

_AS_FAST = 1.1
"""How many times longer than the fastest number of parts one may take that is smaller."""

_WORTH = 100e6
"""Operations that a kernel more must save: 2 µs of an H200."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over rows.

    Attributes:
      before: sums of other rows beside it.
      lengths: of the dimensions that it sums, which are rows, the slowest first.
      columns: sums of the same rows.
    """

    before: int
    lengths: tuple[int, ...]
    columns: int

    @property
    def rows(self) -> int:
        return math.prod(self.lengths)

    def longer(self, parts: int = 1) -> float:
        """How many times longer it takes than one whose blocks all run at once; 0 without any."""
        if self.rows == 1 or self.columns == 1 or not self.before * self.rows * self.columns:
            return 0.0
        if self.rows > _MOST_ROWS:
            return 1.0
        blocks = self.before * parts * -(-self.columns // _COLUMNS)
        return -(-blocks // _AT_ONCE) * _AT_ONCE / blocks

    def divisions(self) -> Iterator[int]:
        """Into how many parts of consecutive rows it can be divided by its dimensions."""
        outer = 1
        for length in self.lengths:
            yield from (outer * n for n in range(1, length + 1) if length % n == 0)
            outer *= length

    def parts(self) -> int:
        """The fewest parts about as fast as any; 1 where they are not worth a kernel more."""
        if self.longer() <= 1.0:
            return 1
        some = [n for n in self.divisions() if self.rows // n >= _LEAST_ROWS] or [1]
        fastest = min(map(self.longer, some))
        best = min(n for n in some if self.longer(n) <= _AS_FAST * fastest)
        saved = self.before * self.rows * self.columns * (self.longer() - self.longer(best))
        return best if OPERATIONS * saved > _WORTH else 1


def operations(eqns: Iterable[JaxprEqn], elements: int, in_parts: bool = False) -> int:
    """What the sums over rows among the equations of a kernel take, as operations. Sums over other
    axes run in other blocks, behind these.

    Args:
      elements: of all arrays that the kernel reads and writes.
      in_parts: whether sums are made in parts where that is worth it.
    """
    longer = {}
    for eqn in filter(is_reduction, eqns):
        parts = parts_of(eqn) if in_parts else 1
        longer[(*eqn.params["axes"],)] = _sum_of(eqn).longer(parts)
    return int(OPERATIONS * elements * sum(longer.values()))


def parts_of(eqn: JaxprEqn) -> int:
    """The number of parts that `eqn` is made in: 1, unless it adds up numbers along dimensions that
    stand together."""
    if eqn.primitive.name != "reduce_sum" or not is_reduction(eqn):
        return 1
    axes, aval = sorted(eqn.params["axes"]), eqn.invars[0].aval
    together = axes == [*range(axes[0], axes[-1] + 1)]
    is_number = jnp.issubdtype(aval.dtype, jnp.floating)
    return _sum_of(eqn).parts() if together and is_number else 1


def is_reduction(eqn: JaxprEqn) -> bool:
    """Whether `eqn` reduces some of its operand's dimensions."""
    return class_of(eqn) is Class.REDUCE and bool(eqn.params.get("axes"))


def _sum_of(eqn: JaxprEqn) -> Sum:
    """The rows that reduction `eqn` sums first. Others are summed behind these, which makes a much
    smaller array."""
    aval: Any = eqn.invars[0].aval
    shape, axes = aval.shape, eqn.params["axes"]
    first = end = min(axes)
    while end < len(shape) and (end in axes or shape[end] == 1):
        end += 1
    return Sum(math.prod(shape[:first]), shape[first:end], math.prod(shape[end:]))
