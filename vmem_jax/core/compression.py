"""compression: the bytes of a tensor without its zeros, as `xla_ffi/zero_values.h` lays them out.

An element is zero if all of its bits are. A compressed tensor is a table with an entry for each
block, a mask of one bit for each element, and the values: the elements that are not zero. The
density is their share.
"""

from __future__ import annotations

import dataclasses
import math

BLOCK_NBYTES = 16384
"""Of the tensor: what one entry of the table is for."""

UNIT_NBYTES = 16
"""The values of each block take a multiple of this."""

_WIDEST = 8  # bytes; a wider element, complex128, is two of these

_ROUNDING = 2.0**-52  # relative; a density that was a quotient of counts gives its count back


def min_capacity(elements: int, itemsize: int) -> int:
    """Bytes of a compressed tensor of zeros alone; no capacity may be smaller.

    Args:
      elements: of the tensor, 0 or more.
      itemsize: bytes of an element: 1, 2, 4, 8 or 16.

    Raises:
      ValueError: `itemsize` is another, or `elements` is negative.
    """
    return _Tensor.of(elements, itemsize).values_offset


def compressed_nbytes(elements: int, itemsize: int, density: float) -> int:
    """The most bytes that a tensor of `density` or less takes, for any distribution of its values.

    The only margin is that the values of each block are rounded up to `UNIT_NBYTES`. At density 1 it
    is about a sixteenth more than the tensor itself, for elements of two bytes.

    Args:
      elements: the number of elements, 0 or more.
      itemsize: bytes of an element: 1, 2, 4, 8 or 16.
      density: the share of elements that are not zero, 0 to 1.

    Raises:
      ValueError: an argument is out of its range.
    """
    if not 0 <= density <= 1:
        raise ValueError(f"`density` must be from 0 to 1. Got {density}.")
    tensor = _Tensor.of(elements, itemsize)
    values = math.ceil(density * (1 - _ROUNDING) * tensor.elements)
    return tensor.values_offset + UNIT_NBYTES * tensor.most_units(values)


def most_values(elements: int, itemsize: int, capacity: int) -> int:
    """The number of values for which `capacity` bytes have room in any distribution; -1 for none.

    So `most_values(...) / elements` is the density up to which a tensor never overflows.

    Args:
      elements: the number of elements, 0 or more.
      itemsize: bytes of an element: 1, 2, 4, 8 or 16. Those of complex128 count twice.
      capacity: bytes.

    Raises:
      ValueError: `itemsize` is another, or `elements` is negative.
    """
    tensor = _Tensor.of(elements, itemsize)
    units = (capacity - tensor.values_offset) // UNIT_NBYTES
    if units < 0:
        return -1
    if tensor.most_units(tensor.elements) <= units:
        return tensor.elements
    spare = UNIT_NBYTES * (units + 1) - 1 - tensor.blocks * (UNIT_NBYTES - tensor.itemsize)
    values = spare // tensor.itemsize
    return values if values >= tensor.blocks else min(units, tensor.blocks)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    elements: int
    itemsize: int

    @classmethod
    def of(cls, elements: int, itemsize: int) -> _Tensor:
        if itemsize not in (1, 2, 4, 8, 16):
            raise ValueError(f"elements have 1, 2, 4, 8 or 16 bytes. Got `itemsize` {itemsize}.")
        if elements < 0:
            raise ValueError(f"`elements` must not be negative. Got {elements}.")
        parts = max(1, itemsize // _WIDEST)
        return cls(elements * parts, itemsize // parts)

    @property
    def blocks(self) -> int:
        return -(-self.elements * self.itemsize // BLOCK_NBYTES)

    @property
    def values_offset(self) -> int:
        """Where the values begin: behind a cursor, the entries and the mask."""
        table = -(-8 * (1 + self.blocks) // UNIT_NBYTES) * UNIT_NBYTES
        mask = -(-self.elements // (8 * UNIT_NBYTES)) * UNIT_NBYTES
        return table + mask

    def most_units(self, values: int) -> int:
        """Units that `values` take at the worst: each block but the empty ones wastes the most."""
        wasted = min(self.blocks, values) * (UNIT_NBYTES - self.itemsize)
        whole = -(-self.elements * self.itemsize // UNIT_NBYTES)
        return min(whole, (values * self.itemsize + wasted) // UNIT_NBYTES)
