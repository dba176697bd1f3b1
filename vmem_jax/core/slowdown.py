"""slowdown: how much longer cuDNN's convolutions take that normalise their operand and add up.

Measured with cuDNN 9.19 on an H200, in float16, batch 256, on 56×56 with 64 and 256 channels: the
fastest plan of either kind. Forwards 1×1 took 1.05 and 1.11 of the bare one with sums, 1.08 and 1.40
with sums and prologue, 3×3 1.05 and 1.13. Gradients to w with a prologue took 1.05 and 1.09 for 1×1,
1.78 for 3×3. Used is the most that was measured, and only where nothing was on the machine itself.
"""

from __future__ import annotations

import dataclasses

from vmem_jax.core.convolution import Convolution, Epilogue, Pass

_SLOWER = {
    # pass, in space, with a prologue
    (Pass.FORWARD, False, False): 1.11,
    (Pass.FORWARD, True, False): 1.05,
    (Pass.FORWARD, False, True): 1.40,
    (Pass.FORWARD, True, True): 1.13,
    (Pass.BACKWARD_FILTER, False, True): 1.09,
    (Pass.BACKWARD_FILTER, True, True): 1.78,
}


def slowdown(convolution: Convolution) -> float:
    """The time of `convolution`, with its prologue and sums, as a multiple of the bare one's."""
    return _SLOWER.get((convolution.which, convolution.is_spatial, convolution.prologue), 1.0)


def bare(convolution: Convolution) -> Convolution:
    """It without prologue and sums."""
    return dataclasses.replace(convolution, prologue=False, epilogue=Epilogue.NONE)
