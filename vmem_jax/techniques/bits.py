"""bits: masks wait for the backward pass as bits, eight in a byte.

The forward pass reads each mask once more to pack it, and the backward pass reads an eighth of it:
that takes about as long as reading the bytes. So where masks are a part of what is kept, all forms of
the step but the step as it is have bits. A mask may still be made again from its random key.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vmem_jax.capture.loop_levels import Level, levels
from vmem_jax.capture.packed_masks import saved_nbytes, with_packed_masks
from vmem_jax.capture.shards import follow_shards
from vmem_jax.core.program import Program
from vmem_jax.techniques.base import AbstractTechnique
from vmem_jax.techniques.context import StepContext
from vmem_jax.techniques.params import PARAMS
from vmem_jax.tracing.traced import TracedStep


class Bits(AbstractTechnique):
    """Masks of the forward pass that the backward pass reads, packed in between."""

    name: ClassVar[str] = "bits"
    verb: ClassVar[str] = "keep masks in bits"

    def unusable(self, step: StepContext) -> str:
        if step.settings.policy.name != "auto":
            return f"policy `{step.settings.policy.name}` plans with the values that there are"
        if "compress" in step.settings.named:
            return "what is compressed is chosen from the values that there are"
        if not _saved_nbytes(step):
            return "the backward pass reads no large mask whose size divides by eight"
        return ""


def in_bits(step: StepContext, budget: int | None) -> StepContext:
    """`step` with its masks in bits; itself where they are too small to matter, or nothing has to be
    freed."""
    if budget is None or "bits" not in step.settings.allowed or Bits().unusable(step):
        return step
    if _saved_nbytes(step) < PARAMS.masks_part * budget:
        return step
    return step if step.peak_by_order <= PARAMS.sure_to_fit * budget else with_bits(step)


def likely_to_fit(step: StepContext, budget: int | None) -> bool:
    """Whether `step` is predicted to peak below `budget` as it is."""
    return budget is None or step.peak_by_order <= PARAMS.likely_to_fit * budget


def packs(step: StepContext) -> bool:
    """Whether `step` packs masks of straight code: those that loops stack are packed where these
    stack something else."""
    return saved_nbytes(step.traced.captured.separate) > 0


def with_bits(step: StepContext) -> StepContext:
    """`step` with its masks in bits."""
    return step.cached("bits", lambda: step.of(_packed(step.traced)))


def levels_of(traced: TracedStep) -> Level:
    """The loops of a step, with its masks in bits where these are."""
    captured = traced.captured
    shards = follow_shards(captured.separate, captured.inputs.shardings)
    level = levels(captured.separate, shards, captured.inputs.platform)
    return level.in_bits(_least(captured.program)) if captured.program.bits else level


def _packed(traced: TracedStep) -> TracedStep:
    captured = traced.captured
    shards = follow_shards(captured.separate, captured.inputs.shardings)
    flat = with_packed_masks(captured.separate, shards, _least(captured.program))
    packed = captured if flat is captured.separate else captured.rewritten(flat)
    program = dataclasses.replace(packed.program, bits=True)
    packed = dataclasses.replace(packed, program=program)
    return dataclasses.replace(traced, captured=packed, plain=packed.flat)


def _least(program: Program) -> int:
    """Bytes of the smallest mask, or stack of masks, that is packed."""
    resident = program.is_resident
    sizes = (b.nbytes for b, held in zip(program.buffers, resident, strict=True) if not held)
    return max(int(PARAMS.least_mask * sum(sizes)), 1)


def _saved_nbytes(step: StepContext) -> int:
    """Bytes that bits save where all masks are kept."""

    def count() -> int:
        traced = with_bits(step).traced
        pairs = [pair for pair, _ in levels_of(traced).all_pairs]
        looped = sum(pair.length * saved_nbytes(pair.body) for pair in pairs)
        return saved_nbytes(traced.captured.separate) + looped

    return step.cached("bits saved", count)
