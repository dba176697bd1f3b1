"""helps: what would help a step that does not fit, in the order of what is predicted of it."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable

from vmem_jax import jax_compat as compat
from vmem_jax.api.failure import Help
from vmem_jax.capture.opened_loops import buried
from vmem_jax.capture.primitives import nbytes
from vmem_jax.core.program import Kind
from vmem_jax.policy import Auto
from vmem_jax.search.log import SearchLog, What
from vmem_jax.techniques import TECHNIQUES, StepContext, steps_in_loops

NOT_ADVISED = frozenset({"compress"})
"""Techniques whose effect depends on the values of a batch, so that nothing predicts it."""

ONE_DEVICE = frozenset({"sub_batches", "logits", "carry", "row_kernels"})
"""Techniques that no step on several devices uses."""


def helps_of(
    step: StepContext, log: SearchLog, lowest: int, predict: Callable[[StepContext], int | None]
) -> list[Help]:
    """What may help `step`, unordered.

    Args:
      lowest: the lowest peak that was reached, in bytes.
      predict: the lowest peak of the step with other settings, in bytes, where that can be predicted.
    """
    settings, program = step.settings, step.traced.captured.program
    arguments = program.arguments_nbytes
    found = [*_donations(step)]
    moments = sum(b.nbytes for b in program.buffers if b.kind is Kind.OPTIMISER)
    if moments and "stream" in settings.allowed and not program.hosted and step.platform != "cpu":
        found.append(
            Help("Keep the optimiser state in host memory (docs/how-it-works.md)", moments)
        )
    if (wider := _wider(step)) is not None:
        other, text = wider
        reached = predict(other)
        found.append(Help(text, None if reached is None else max(lowest - reached, 0)))
    halved = (lowest - arguments) // 2
    if inner := _inner_steps(step):
        found.append(Help(inner, halved))
    for name, why in log.skipped.items():
        needs_gpu = name == "offload" and step.platform == "cpu"
        needs_one = name in ONE_DEVICE and step.traced.captured.shards.device_count > 1
        if (needs_gpu or needs_one) and name not in settings.named:
            continue  # nothing that a user of this step can do
        if name == "sub_batches" and (inner or settings.policy.name != "auto"):
            continue  # what another policy does, or not before there is one training step
        text = f'"{name}" is not used: {why.removesuffix(".")}'
        gain = halved if name == "sub_batches" and not needs_one else None
        found.append(Help(text, gain, asked=name in settings.named))
    for line in log.of(What.DROPPED)[:1]:
        found.append(Help(f"{line.variant} was dropped: {line.why.removesuffix('.')}"))
    return found


def _donations(step: StepContext) -> list[Help]:
    """Donating the arguments whose memory results of the same shape and dtype can take."""
    traced = step.traced
    like = lambda aval: (aval.shape, aval.dtype)
    free = collections.Counter(like(v.aval) for v in compat.open_jaxpr(traced.plain).outvars)
    free.subtract(like(a) for a, given in zip(traced.avals, traced.donated, strict=True) if given)
    freed, names = 0, dict[str, None]()
    for aval, name, given in zip(traced.avals, traced.names, traced.donated, strict=True):
        if not given and aval.shape and free[like(aval)] > 0:
            free[like(aval)] -= 1
            freed += nbytes(aval)
            names[re.split(r"[.\[ ]", name)[0]] = None
    if not freed:
        return []
    which = ", ".join(f"`{name}`" for name in names)
    text = f"Donate the state (`donate_argnums`): the results can take the memory of {which}"
    return [Help(text, freed)]


def _inner_steps(step: StepContext) -> str:
    """That training steps in a loop of loops can be planned by themselves; "" without any."""
    plans_inside = step.settings.policy.name in steps_in_loops.POLICIES
    loop = buried(step.traced.captured) if plans_inside else None
    if loop is None:
        return ""
    return (
        f"The training steps in the loop at {compat.user_line(loop)} are not planned, since it lies "
        "in another loop: give `vmem_jax.jit` the function with the inner loop alone, and call that "
        "in the outer loop, under `jax.jit`"
    )


def _wider(step: StepContext) -> tuple[StepContext, str] | None:
    """(the step with all techniques that it can use, what the user would do for that), or None."""
    settings = step.settings
    names = [name for name in TECHNIQUES if name in settings.allowed or name not in NOT_ADVISED]
    policy = Auto(allow=tuple(names))
    wide = dataclasses.replace(settings, allowed=policy.allow, policy=policy, sub_batches=None)
    other = StepContext(wide, step.traced, step.leaves, step.target, step.inlined)
    missing = [n for n in names if n not in settings.allowed and not TECHNIQUES[n].unusable(other)]
    does = []
    if settings.policy.name != "auto":
        does.append("take policy `auto`, which has more techniques")
    elif missing:
        does.append("let `allow` name " + ", ".join(f'"{name}"' for name in missing) + " as well")
    if settings.sub_batches == 1:
        does.append("leave out `sub_batches=1`")
    text = ", and ".join(does)
    return (other, text[0].upper() + text[1:]) if text else None
