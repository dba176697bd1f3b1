"""own_kernels: which steps run kernels of this library in place of those of XLA and cuDNN."""

from __future__ import annotations

from vmem_jax.techniques.context import StepContext

POLICIES = ("auto", "exact")
"""Those that use them unasked: the published systems have their own kernels."""


def why_not(step: StepContext, is_named: bool) -> str:
    """Why `step` does not use a technique with such kernels, for people; "" if it may. `is_named`:
    whether `allow` or a given plan names it."""
    policy = step.settings.policy.name
    if policy == "keep":
        return "policy `keep` leaves the step as it is"
    if not is_named and policy not in POLICIES:
        return f"policy `{policy}` plans with the kernels that there are"
    if not is_named and not _is_known(step.target or step.devices[0].device_kind):
        return (
            "its kernels were timed on an H200, whose cores an H100 has: elsewhere it is used only "
            "where `allow` names it"
        )
    if step.traced.captured.shards.device_count > 1:
        return "it runs on several devices"
    return ""


def _is_known(card: str) -> bool:
    """Whether the kernels are worth it on cards of that name, or `device_kind`."""
    return any(name in card.lower() for name in ("h100", "h200"))
