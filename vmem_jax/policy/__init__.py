"""Policies: one file each, and the table of their names."""

from __future__ import annotations

from vmem_jax.policy.auto import Auto
from vmem_jax.policy.base import AbstractPolicy, Infeasible
from vmem_jax.policy.exact import Exact
from vmem_jax.policy.keep import Keep
from vmem_jax.policy.modnn import MoDNN
from vmem_jax.policy.recompute import Recompute
from vmem_jax.policy.superneurons import SuperNeurons
from vmem_jax.policy.ucudnn import UCuDNN
from vmem_jax.policy.vdnn import VDNN
from vmem_jax.policy.vdnnpp import VDNNpp

POLICIES: dict[str, type[AbstractPolicy]] = {
    policy.name: policy
    for policy in (Auto, Exact, Keep, MoDNN, Recompute, SuperNeurons, UCuDNN, VDNN, VDNNpp)
}
"""A new policy is a file and one entry here."""

__all__ = [
    "POLICIES",
    "VDNN",
    "AbstractPolicy",
    "Auto",
    "Exact",
    "Infeasible",
    "Keep",
    "MoDNN",
    "Recompute",
    "SuperNeurons",
    "UCuDNN",
    "VDNNpp",
]
