"""verify: what a given plan has cuDNN do, held against the convolutions before it runs.

A plan that was made here takes only what was held against them when it was timed. One that was saved
may be from another machine, and engines' numbers mean something to one version of cuDNN.
"""

from __future__ import annotations

import jax

from vmem_jax.conv import cudnn
from vmem_jax.conv.scratch import Scratch
from vmem_jax.core.convolution import XLA, Epilogue
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program
from vmem_jax.errors import PlanError


def try_configurations(program: Program, plan: Plan, device: jax.Device) -> None:
    """Tries each algorithm of cuDNN in `plan` once, on `device`; nothing where that is no GPU.

    Raises:
      PlanError: one does not run, or computes something else.
      ImportError: there is no cuDNN, or the extension was built without it.
    """
    if device.platform != "gpu":
        return
    scratch = Scratch(device)
    tried = set()
    for s, configuration in plan.divided:
        step = program.steps[s]
        assert step.convolution is not None, "the plan was made for the program"
        for micro in configuration.micros:
            epilogue = Epilogue.NONE if micro.bare else configuration.epilogue
            part = step.convolution.with_epilogue(epilogue).with_batch(micro.batch)
            if micro.engine == XLA or (part, micro.algorithm) in tried:
                continue
            tried.add((part, micro.algorithm))
            try:
                cudnn.check(part, micro, device, scratch)
            except (RuntimeError, ValueError) as error:
                raise PlanError(
                    f"the given plan has cuDNN do {part} at {step}, and on this "
                    f"{device.device_kind} that fails: {error}. Plan again for this machine."
                ) from error
