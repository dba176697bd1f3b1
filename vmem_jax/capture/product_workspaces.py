"""product_workspaces: what XLA:GPU has in memory beside the result of a matrix product while it runs.

Two things. A product whose result is too small to occupy the card is made in parts: its inner
dimension is split, each part has a result of its own in the type that products are summed in, and a
second kernel adds these up. XLA's `SplitkRewriter` (xla/backends/gpu/transforms/splitk_rewriter.cc)
decides it by a formula, before any kernel is timed, so that it is predicted exactly: of 48 products
of random sizes all are split as XLA 0.11.2 splits them for an H200. Programs compiled without Triton
have no such products.

A product that cuBLAS computes has, besides, bytes of its own: 32 MiB from Hopper on, 4 MiB before
(`kHopperWorkspace` and `kDefaultWorkspace` in XLA's matmul_utils.h). Where the card is there, XLA
times cuBLAS's kernels and Triton's, which have none, and takes the fastest. No prediction can tell
which. So each product of at least 2 GFLOP is taken for cuBLAS's, and no smaller one: in three
recurrent networks on an H200 those of 0.8 GFLOP and less are Triton's, those of 2.1 and more
cuBLAS's, but for one of 4.2 in parts. Where a large product of Triton's runs at the peak, the
prediction is higher by what it has not. Where the card is not there, XLA times nothing, and no
product is cuBLAS's.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from vmem_jax.jax_compat import SPLITS_PRODUCTS, JaxprEqn

LARGE_FLOPS = 2e9
"""Operations of the smallest product that is taken for cuBLAS's."""

_HOPPER, _BLACKWELL = 9, 10
"""The major parts of their compute capabilities."""

_TILE = 128
"""Rows and columns of the result that one program makes, by XLA's formula."""

_PARTS = tuple(2**i for i in range(12))
"""The numbers of parts that XLA weighs."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """What XLA takes a product in parts to cost, in units of its own.

    Attributes:
      operation, nbyte: an operation of one program, a byte of operands and parts.
      summed: a byte of the parts and the result while the parts are added up.
      launch: the kernel that adds them up.
    """

    operation: float
    nbyte: float
    summed: float
    launch: float


_WEIGHTS = {
    _BLACKWELL: Weights(100.0, 0.0848863, 189.711, 1.21563e8),
    _HOPPER: Weights(100.0, 0.194136, 193.1384, 4.36e7),
    0: Weights(100.0, 0.0666955, 467.815, 5.65307e7),
}
"""By the least major part of the compute capability. XLA's, of splitk_rewriter.cc."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The dimensions of a batched product, and the bytes of an element of what it reads and writes.

    Attributes:
      summed: bytes of an element of the type in which products are added up.
    """

    batch: int
    rows: int
    columns: int
    inner: int
    left: int
    right: int
    summed: int
    result: int

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Size:
        """That of a `dot_general`."""
        (contract, _), (batch, _) = eqn.params["dimension_numbers"]
        left, right = (a.aval for a in eqn.invars)
        made = eqn.outvars[0].aval
        length = lambda dims: math.prod(left.shape[d] for d in dims)
        inner, batches = length(contract), length(batch)
        rows = math.prod(left.shape) // max(inner * batches, 1)
        columns = math.prod(right.shape) // max(inner * batches, 1)
        nbytes = [a.dtype.itemsize for a in (left, right, made)]
        summed = max(nbytes[2], np.dtype(np.float32).itemsize)
        return cls(batches, rows, columns, inner, nbytes[0], nbytes[1], summed, nbytes[2])


@dataclasses.dataclass(frozen=True)
class Products:
    """How products are computed on one card.

    Attributes:
      most: the bytes that XLA gives a product of cuBLAS; 0 where cuBLAS computes none.
      cores: its streaming multiprocessors; 0 where they are not known.
      major: the major part of its compute capability.
      splits: whether products are made in parts.
    """

    most: int = 0
    cores: int = 0
    major: int = 0
    splits: bool = True

    def workspace(self, flops: float, size: Size | None) -> int:
        """Bytes that are live beside operands and result while a product runs.

        Args:
          flops: its operations.
          size: None for one that is not made in parts.
        """
        blas = self.most if flops >= LARGE_FLOPS else 0
        if size is None or (parts := self.parts(size)) == 1:
            return blas
        made = size.batch * size.rows * size.columns
        # the result is there when the operands are not needed any more, and has their place
        return blas + max(parts * made * size.summed - made * size.result, 0)

    def parts(self, size: Size) -> int:
        """Into how many parts XLA splits the inner dimension of a product.

        That of least cost by `EstimateGemmCostAfterSplitK` and `ChooseSplitK` of XLA's
        splitk_rewriter.cc: the longer of computing and memory, and what it takes to add up.
        """
        is_empty = not size.batch * size.rows * size.columns * size.inner
        if is_empty or not (self.splits and self.cores):
            return 1
        weights = next(w for major, w in _WEIGHTS.items() if self.major >= major)
        return min(_PARTS, key=lambda parts: self._cost(size, parts, weights))

    def _cost(self, size: Size, parts: int, weights: Weights) -> float:
        batch = size.batch * parts
        made = batch * size.rows * size.columns
        tile = min(size.rows, _TILE) * min(size.columns, _TILE)
        tiles = batch * math.ceil(size.rows / _TILE) * math.ceil(size.columns / _TILE)
        rounds = max(1.0, tiles / (self.cores * _TILE**2 / tile))
        computing = 2 * tile * math.ceil(size.inner / parts) * rounds * weights.operation
        operands = size.rows * size.left + size.columns * size.right
        read = size.batch * size.inner * operands
        written = made * (size.result if parts == 1 else size.summed)
        cost = max(computing, (read + written) * weights.nbyte)
        if parts == 1:
            return cost
        added = made * size.summed + made // parts * size.result
        return cost + weights.launch + added * weights.summed


UNKNOWN_PRODUCTS = Products()
"""Where nothing is known of the card."""


def products_on(capability: str, cores: int, is_there: bool, large: bool) -> Products:
    """How XLA computes products on a card.

    Args:
      capability: "9.0", as JAX has it of a CUDA device; "" where there is none.
      cores: its streaming multiprocessors.
      is_there: whether XLA can time kernels on it.
      large: whether the step's arguments take `compiler.compile.LARGE_NBYTES`: it is compiled
        without Triton then for a card that is not there.
    """
    major = capability.partition(".")[0]
    if not major.isdecimal():  # no card of NVIDIA's
        return UNKNOWN_PRODUCTS
    workspace = (32 if int(major) >= _HOPPER else 4) << 20
    splits = SPLITS_PRODUCTS and (is_there or not large)
    return Products(workspace if is_there else 0, cores, int(major), splits)
