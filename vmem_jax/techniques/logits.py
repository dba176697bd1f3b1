"""logits: the end of a step, around its largest product, runs on some tokens at a time.

Cross-entropy over a large vocabulary makes the logits of all tokens, and their gradient beside them.
In chunks only those of one chunk exist. The loss of each token and the gradient of the hidden state
are the same but for rounding; the gradient of the head's weights is summed in float32. Each chunk
reads the head's weights, and reads and writes that sum, so more chunks take longer.

Cut cross-entropy (Wijmans et al., ICLR 2025) computes the same in kernels of its own, and Liger
Kernel (Hsu et al., 2024) chunk by chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from vmem_jax.capture.logits import Tail, find_tail
from vmem_jax.rewrite.logits import in_chunks
from vmem_jax.techniques.base import AbstractTechnique
from vmem_jax.techniques.context import StepContext
from vmem_jax.techniques.params import PARAMS


class Logits(AbstractTechnique):
    """The largest product of the step and what follows it, in chunks of tokens."""

    name: ClassVar[str] = "logits"
    verb: ClassVar[str] = "run its logits in chunks of tokens"

    def unusable(self, step: StepContext) -> str:
        if step.settings.policy.name != "auto":
            return f"policy `{step.settings.policy.name}` plans all tokens at once"
        if "compress" in step.settings.named:
            return "what is compressed waits for the whole step"
        if (step.settings.sub_batches or 1) > 1:
            return "it runs in sub-batches, whose samples chunks of tokens mix"
        if step.traced.captured.shards.device_count > 1:
            return "it runs on several devices"
        found = _tail(step)
        return found if isinstance(found, str) else ""


def logit_chunks(step: StepContext, budget: int | None) -> list[int]:
    """The numbers of chunks of `step`'s logits that are worth planning for, rising; none where these
    are too small to matter, or nothing has to be freed."""
    settings = step.settings
    if budget is None or "logits" not in settings.allowed or Logits().unusable(step):
        return []
    tail = _tail(step)
    assert isinstance(tail, Tail), "a step without one cannot use it"
    if tail.nbytes < PARAMS.logits_part * budget:
        return []
    if step.peak_by_order <= PARAMS.sure_to_fit * budget:
        return []
    return _counts(tail.size)


def with_logits(step: StepContext, count: int) -> StepContext:
    """`step` with its logits in `count` chunks, as a plan says it; itself where it has none."""
    return step.cached(f"logits {count}", functools.partial(_in_chunks, step, count))


def _in_chunks(step: StepContext, count: int) -> StepContext:
    tail = _tail(step)
    if not isinstance(tail, Tail) or not 1 < count <= tail.size:
        return step
    captured = step.traced.captured
    chunked = captured.rewritten(in_chunks(captured.separate, tail, count))
    program = dataclasses.replace(chunked.program, logit_chunks=count)
    chunked = dataclasses.replace(chunked, program=program)
    return step.of(dataclasses.replace(step.traced, captured=chunked, plain=chunked.flat))


def _tail(step: StepContext) -> Tail | str:
    return step.cached("tail", lambda: find_tail(step.traced.captured.separate))


def _counts(size: int) -> list[int]:
    """Divisors of `size` nearest below `PARAMS.logit_chunks`."""
    below = lambda most: max(n for n in range(1, min(most, size) + 1) if size % n == 0)
    return sorted({below(most) for most in PARAMS.logit_chunks} - {1})
