"""Checks of the arguments of `jit`."""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax.errors import parse_budget, python_number
from vmem_jax.policy import POLICIES, AbstractPolicy, Auto, Keep
from vmem_jax.transfer.transport_choice import TRANSPORTS

TECHNIQUES = (
    "order",
    "recompute",
    "offload",
    "stream",
    "workspace",
    "sub_batches",
    "logits",
    "bits",
    "carry",
    "row_kernels",
    "compress",
)
"""What a plan may use. By default all but the last two are used."""


def techniques(allow: str | Sequence[str] | None) -> tuple[str, ...]:
    """The techniques of `allow`; all if it is None. Raises ValueError for an unknown name."""
    allow = TECHNIQUES if allow is None else (allow,) if isinstance(allow, str) else tuple(allow)
    unknown = [name for name in allow if name not in TECHNIQUES]
    if unknown or not allow:
        known = ", ".join(TECHNIQUES)
        raise ValueError(f"`allow` names {unknown or 'nothing'}; there is {known}.")
    return allow


def policy_of(
    policy: str | AbstractPolicy, allow: str | Sequence[str] | None
) -> tuple[AbstractPolicy, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The policy of that name; the techniques allowed, named and required, as `Settings` has them.

    Raises:
      ValueError: it is unknown, or `allow` leaves out what it needs.
    """
    allowed = techniques(allow)
    if isinstance(policy, str):
        if policy not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise ValueError(f"`policy`={policy!r} is unknown; there is {known}.")
        policy = Auto(allow=allowed) if policy == "auto" else POLICIES[policy]()
    if missing := [name for name in policy.needs if name not in allowed]:
        raise ValueError(
            f"policy `{policy.name}` needs {', '.join(missing)}, which `allow`={allow!r} leaves out."
        )
    named = policy.needs if allow is None else allowed
    alone = allowed if allow is not None and len(allowed) == 1 else ()
    return policy, allowed, named, tuple(dict.fromkeys((*policy.needs, *alone)))


def host_nbytes(host_budget: int | str | None) -> int | None:
    """`host_budget` in bytes. Raises ValueError if it is no size."""
    if host_budget is None:
        return None
    nbytes = parse_budget(host_budget)
    if not isinstance(nbytes, int):
        raise ValueError(f"`host_budget`={host_budget!r} is no size: bytes, or '64GiB'.")
    return nbytes


def sub_batches_of(sub_batches: int | None, policy: AbstractPolicy) -> int | None:
    """`sub_batches`, checked. Raises TypeError or ValueError."""
    if sub_batches is None:
        return None
    count = python_number(sub_batches)
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"`sub_batches` must be an int or None. Got {sub_batches!r}.")
    if count < 1:
        raise ValueError(f"`sub_batches` must be at least 1. Got {count}.")
    if count > 1 and isinstance(policy, Keep):
        raise ValueError(
            f"policy `keep` leaves the step as it is, but `sub_batches` is {count}. Use "
            "policy='exact', which recomputes nothing."
        )
    return count


def density_of(density: float | None) -> float | None:
    """`density`, checked. Raises TypeError or ValueError."""
    if density is None:
        return None
    share = python_number(density)
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TypeError(f"`density` must be a number or None. Got {density!r}.")
    if not 0 <= share <= 1:
        raise ValueError(f"`density` must be from 0 to 1. Got {share}.")
    return share


def transport_of(transport: str) -> str:
    """`transport`, checked. Raises ValueError."""
    if transport not in TRANSPORTS:
        raise ValueError(f"`transport`={transport!r} is unknown; there is {', '.join(TRANSPORTS)}.")
    return transport
