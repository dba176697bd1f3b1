"""Techniques: one file each, and the table of them."""

from __future__ import annotations

from vmem_jax.techniques.base import AbstractTechnique, Form
from vmem_jax.techniques.bits import Bits
from vmem_jax.techniques.carry import Carry
from vmem_jax.techniques.compress import Compress
from vmem_jax.techniques.context import StepContext
from vmem_jax.techniques.logits import Logits
from vmem_jax.techniques.offload import Offload
from vmem_jax.techniques.order import Order
from vmem_jax.techniques.recompute import Recompute
from vmem_jax.techniques.row_kernels import RowKernels
from vmem_jax.techniques.stream import Stream
from vmem_jax.techniques.sub_batches import SubBatches
from vmem_jax.techniques.workspace import Workspace

TECHNIQUES: dict[str, AbstractTechnique] = {
    technique.name: technique
    for technique in (
        Order(),
        Recompute(),
        RowKernels(),
        SubBatches(),
        Logits(),
        Bits(),
        Carry(),
        Offload(),
        Stream(),
        Workspace(),
        Compress(),
    )
}
"""The techniques, in the order in which they adapt a form: sub-batches set the costs of a part before
transfers use them, and hosted arguments come before convolutions. A new technique is a file, an entry
here, and its name in `techniques.jit_arguments`."""

__all__ = ["TECHNIQUES", "AbstractTechnique", "Form", "StepContext"]
