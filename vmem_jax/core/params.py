"""The constants of what is computed from Programs and Plans."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CoreParams:
    """How far searches within simulations go.

    Formats, alignments and what was measured of a machine are no parameters: they stand where they
    are used.

    Attributes:
      heap_offsets: offsets between residents that one value is tried at; in very deep networks
        there are thousands.
      packed_exactly: tensors up to which an exact packing is searched for.
      packing_states: states of that search after which it gives up.
      spine_steps: steps from a position on that are looked at for what they read, to find its
        spine.
      early_steps: steps in front of what waits for nothing that are looked at for a value that it
        can wait for.
      early_small: small values that may be made at the start, all together, in sizes of one such
        value; four are a five-hundredth of a step's temporaries.
      siblings: elementwise steps before another one that may be one kernel with it.
      row_major_part: of what a plan needs; for so much more it still states layouts, which make
        its updates faster.
      corrected_times: the factor, or its inverse, beyond which it is not the times of these steps
        that a measured step shows to be wrong.
    """

    heap_offsets: int = 100
    packed_exactly: int = 12
    packing_states: int = 20_000
    spine_steps: int = 8
    early_steps: int = 64
    early_small: int = 4
    siblings: int = 8
    row_major_part: float = 0.005
    corrected_times: float = 8.0


PARAMS = CoreParams()
