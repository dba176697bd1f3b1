"""blas: the workspaces that XLA:GPU gives matrix products where cuBLAS computes them.

A product that cuBLAS computes has, beside its result, bytes that are live while it runs: 32 MiB from
Hopper on, 4 MiB before (`kHopperWorkspace` and `kDefaultWorkspace` in XLA's matmul_utils.h), and no
more than its operands have (GemmWorkspaceRewriteVisitor in XLA's gemm_rewriter.cc).

Where the card is there, XLA times cuBLAS's kernels and Triton's, which have no workspace, and takes
the fastest. No prediction can tell which. So each product of at least 4 GFLOP is taken for
cuBLAS's, and no smaller one: what two plans of an LSTM compile to on an H100 is predicted 0.5 and
0.9 % too high by that, and 2.5 and 4.6 % too low without workspaces. Where a large product of
Triton's runs at the peak, the prediction is higher by the workspace that it has not. Where the card
is not there, XLA times nothing, and no product has one.
"""

from __future__ import annotations

from collections.abc import Sequence

LARGE_FLOPS = 4e9
"""Operations of the smallest product that is taken for cuBLAS's."""

_HOPPER = 9
"""The major part of its compute capability."""


def blas_workspace_nbytes(compute_capability: str) -> int:
    """The most bytes that XLA gives a product of cuBLAS on a card.

    Args:
      compute_capability: "9.0", as JAX has it of a CUDA device; "" where no card is.
    """
    major, _, _ = compute_capability.partition(".")
    if not major.isdecimal():  # no card of NVIDIA's
        return 0
    return (32 if int(major) >= _HOPPER else 4) << 20


def product_workspace(most: int, flops: float, operands: Sequence[int]) -> int:
    """Bytes that are live beside operands and result while a product runs.

    Args:
      most: the most that the card's products have, 0 where cuBLAS has none.
      flops: its operations.
      operands: bytes of each.
    """
    return min(most, sum(operands)) if flops >= LARGE_FLOPS else 0
