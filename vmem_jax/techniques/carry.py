"""carry: kernels of 1×1 convolutions compute what stands around them.

A normalisation, a ReLU and a residual sum before a convolution, the statistics of the next batch
norm behind it, and in the backward pass both gradients and the sums of the batch norm before are
computed in the tiles of one kernel. A normalised value that only such kernels read is not written,
and not kept. The values are the same but for the order of sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from vmem_jax import jax_compat as compat
from vmem_jax.capture.carried import Carrying, find_carrying
from vmem_jax.rewrite.carried import describe, with_carried
from vmem_jax.techniques.base import AbstractTechnique
from vmem_jax.techniques.context import StepContext


class Carry(AbstractTechnique):
    """Normalisations and sums in the kernels of convolutions."""

    name: ClassVar[str] = "carry"
    verb: ClassVar[str] = "compute what stands around convolutions in their kernels"

    def unusable(self, step: StepContext) -> str:
        if self.name not in step.settings.named:
            return "it is used only where `allow` names it"
        if step.settings.policy.name == "keep":
            return "policy `keep` leaves the step as it is"
        if step.traced.captured.shards.device_count > 1:
            return "it runs on several devices"
        if not _found(step):
            return "no 1×1 convolution in 16 bits, channels last, stands beside elementwise work"
        if not _chosen(step):
            return "no kernel for convolutions of these widths is known to be faster"
        return ""


def carry_contexts(step: StepContext) -> list[StepContext]:
    """`step` with the convolutions that carry what stands around them; none if it does not use it."""
    if Carry().unusable(step):
        return []
    return [step.cached("carried", lambda: with_carry(step, _chosen(step)))]


def with_carry(step: StepContext, chosen: Sequence[int]) -> StepContext:
    """`step` with the chosen of the convolutions that can, as a plan says; itself where there are
    fewer."""
    found = _found(step)
    if not chosen or max(chosen) >= len(found):
        return step
    captured = step.traced.captured
    carrying = captured.rewritten(with_carried(captured.separate, [found[i] for i in chosen]))
    program = dataclasses.replace(carrying.program, carried=tuple(chosen))
    carrying = dataclasses.replace(carrying, program=program)
    return step.of(dataclasses.replace(step.traced, captured=carrying, plain=carrying.flat))


def _found(step: StepContext) -> tuple[Carrying, ...]:
    return step.cached("carrying", lambda: find_carrying(step.traced.captured.separate))


def _chosen(step: StepContext) -> tuple[int, ...]:
    """The convolutions whose kernels are worth it: on a GPU those of widths for which a kernel is
    known, elsewhere all, by XLA's passes."""
    found = _found(step)
    if step.platform != "gpu":
        return tuple(range(len(found)))
    eqns = compat.open_jaxpr(step.traced.captured.separate).eqns
    return tuple(i for i, each in enumerate(found) if describe(each, eqns).tiling is not None)
