"""What the arguments of `jit` say, checked."""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax.errors import parse_budget
from vmem_jax.policy import POLICIES, AbstractPolicy, Auto
from vmem_jax.transfer.choice import TRANSPORTS

MEANS = ("order", "recompute", "offload", "stream", "workspace")
"""What a plan may use. Sub-batches will follow."""


def means(allow: str | Sequence[str] | None) -> tuple[str, ...]:
    """The means of `allow`: all, if it is None. Raises ValueError for one that there is not."""
    allow = MEANS if allow is None else (allow,) if isinstance(allow, str) else tuple(allow)
    unknown = [name for name in allow if name not in MEANS]
    if unknown or not allow:
        raise ValueError(f"`allow` names {unknown or 'nothing'}; there is {', '.join(MEANS)}.")
    return allow


def policy_of(
    policy: str | AbstractPolicy, allow: Sequence[str] | None
) -> tuple[AbstractPolicy, tuple[str, ...], tuple[str, ...]]:
    """The policy of that name with the means of `allow`; all of these; those asked for by name.

    What is asked for is an error where it cannot be: what `allow` names, or what the policy needs.

    Raises:
      ValueError: it is unknown, or `allow` leaves out what it needs.
    """
    allowed = means(allow)
    if isinstance(policy, str):
        if policy not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise ValueError(f"`policy`={policy!r} is unknown; there is {known}.")
        policy = Auto(allow=allowed) if policy == "auto" else POLICIES[policy]()
    if missing := [name for name in policy.needs if name not in allowed]:
        raise ValueError(
            f"policy `{policy.name}` needs {', '.join(missing)}, which `allow`={allow!r} leaves out."
        )
    return policy, allowed, policy.needs if allow is None else allowed


def host_nbytes(host_budget: int | str | None) -> int | None:
    """`host_budget` in bytes. Raises ValueError if it is no size."""
    if host_budget is None:
        return None
    nbytes = parse_budget(host_budget)
    if not isinstance(nbytes, int):
        raise ValueError(f"`host_budget`={host_budget!r} is no size: bytes, or '64GiB'.")
    return nbytes


def transport_of(transport: str) -> str:
    """`transport`, if there is such. Raises ValueError."""
    if transport not in TRANSPORTS:
        raise ValueError(f"`transport`={transport!r} is unknown; there is {', '.join(TRANSPORTS)}.")
    return transport
