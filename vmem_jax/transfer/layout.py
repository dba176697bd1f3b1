"""Layout: the slots of an arena, fixed by the plan before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vmem_jax.core.packing import ALIGNMENT, Interval, pack, round_up


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A stack of `depth` entries for tensors of `nbytes` bytes each.

    A slot outside of loops has one entry; in a loop body it is as deep as the loop is long:
    the forward loop pushes a tensor an iteration and the backward loop pops them in reverse.
    """

    offset: int
    nbytes: int
    depth: int = 1

    @property
    def stride(self) -> int:
        """Bytes from one entry to the next."""
        return round_up(self.nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Parked:
    """A tensor of `nbytes` that is parked from time `first` to time `last`."""

    nbytes: int
    first: int
    last: int
    depth: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The slots of an arena of `nbytes` bytes.

    Slots that are never parked at the same time may overlap. The handlers check at every start that
    the memory is free.
    """

    slots: tuple[Slot, ...]
    nbytes: int

    def __post_init__(self) -> None:
        for i, slot in enumerate(self.slots):
            end = slot.offset + slot.depth * slot.stride
            if min(slot.offset, slot.nbytes, slot.depth - 1) < 0 or slot.offset % ALIGNMENT:
                raise ValueError(f"slot {i} has a negative or unaligned member: {slot}.")
            if end > self.nbytes:
                raise ValueError(f"slot {i} ends at byte {end} of an arena of {self.nbytes}.")

    @classmethod
    def of(cls, parked: Sequence[Parked]) -> Layout:
        """Packs `parked`, one slot each, into an arena of about the most bytes parked at once."""
        packing = pack([Interval(p.depth * round_up(p.nbytes), p.first, p.last) for p in parked])
        slots = zip(packing.offsets, parked, strict=True)
        return cls(tuple(Slot(o, p.nbytes, p.depth) for o, p in slots), packing.nbytes)
