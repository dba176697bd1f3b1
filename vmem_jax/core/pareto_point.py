"""The trade of seconds against bytes, as a value."""

from __future__ import annotations

import dataclasses

from vmem_jax.core.plan import Plan


@dataclasses.dataclass(frozen=True)
class ParetoPoint:
    """One plan of which none is both slower and larger than another.

    Attributes:
      budget: bytes; the smallest budget that the plan meets.
      predicted_seconds: of one step.
      predicted_peak: bytes that the compiled step was predicted to need.
      compiled_peak: bytes that it needs; None where nothing was compiled.
      techniques: what the plan does, by the names that `allow` has for it; empty where it leaves the
        step as it is.
      plan: it, for `jit(plan=…)`.
    """

    budget: int
    predicted_seconds: float
    predicted_peak: int
    compiled_peak: int | None
    techniques: tuple[str, ...]
    plan: Plan
