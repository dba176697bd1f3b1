"""packed_masks: masks that wait for the backward pass in bits, eight in a byte.

A dropout mask or that of a ReLU is one byte an element, and the backward pass reads it long after
the forward pass has. Here it is packed where it is made (`capture.bits`), and what would read it from
memory reads the bytes, and unpacks them. So a plan keeps, moves or makes again the bytes like any
other value, and the mask exists nowhere: XLA makes the random bits of dropout in the kernel that
packs them.

Only masks that the backward pass would read from memory are packed, never those that it computes from
what it reads anyway. Where the forward pass computes a mask in the kernels that read it, as that of a
leaky ReLU, it goes on to do so, and only the backward pass reads bytes. What both make of such a mask
(its complement, a cast) the backward pass makes of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.bits import BITS, pack_p, packed_aval, unpack_p
from vmem_jax.capture.fuse import fuse
from vmem_jax.capture.kernels import Kernel
from vmem_jax.capture.kinds import phases_of
from vmem_jax.capture.loop_pairs import Pair
from vmem_jax.capture.primitives import Class, class_of, nbytes
from vmem_jax.capture.shards import Shards
from vmem_jax.core.program import Phase
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var


def with_packed_masks(flat: ClosedJaxpr, shards: Shards, least: int) -> ClosedJaxpr:
    """The step `flat` with the masks of its straight code in bits; itself where it has none.

    Args:
      shards: how its values are split over devices.
      least: bytes of the smallest mask that is packed.
    """
    kernels, eqns = fuse(flat, shards=shards), compat.open_jaxpr(flat).eqns
    phases = phases_of(kernels, eqns)
    late = [phase is not Phase.FORWARD for phase in phases]
    return _packed(flat, kernels, late, shards, least)


def with_packed_residuals(pair: Pair, outside: Shards, least: int) -> Pair:
    """`pair` with the masks in bits that its second loop may read of the first; itself where there
    are none.

    Args:
      outside: how the values of the step are split over devices.
      least: bytes of the smallest stack of masks that is packed.
    """
    shards = pair.shards(outside)
    kernels = fuse(pair.body, pair.boundary, shards=shards)
    late = [not pair.late.isdisjoint(kernel.reads) for kernel in kernels]
    body = _packed(pair.body, kernels, late, shards, -(-least // pair.length))
    return pair if body is pair.body else dataclasses.replace(pair, body=body)


def saved_nbytes(flat: ClosedJaxpr) -> int:
    """By how many bytes the masks that `flat` packs are larger than their bits."""
    packs = (eqn for eqn in compat.open_jaxpr(flat).eqns if eqn.primitive is pack_p)
    return sum(nbytes(eqn.invars[0].aval) - nbytes(eqn.outvars[0].aval) for eqn in packs)


def _packed(
    flat: ClosedJaxpr, kernels: Sequence[Kernel], late: Sequence[bool], shards: Shards, least: int
) -> ClosedJaxpr:
    """`flat` with the masks in bits that are written by kernels which are not `late`, and read by
    those that are."""
    first = [kernel for kernel, is_late in zip(kernels, late, strict=True) if not is_late]
    second = [kernel for kernel, is_late in zip(kernels, late, strict=True) if is_late]
    masks = _masks(flat, first, second, shards, least)
    return _Packer(flat, first, second, masks).run() if masks else flat


def _masks(
    flat: ClosedJaxpr,
    first: Sequence[Kernel],
    second: Sequence[Kernel],
    shards: Shards,
    least: int,
) -> dict[Var, int]:
    """The masks of at least so many bytes, each with the axis along which it is packed."""
    opened = compat.open_jaxpr(flat)
    fused = lambda kernel: class_of(opened.eqns[kernel.root]) is not Class.HEAVY
    made = {v for kernel in first if fused(kernel) and not kernel.tied for v in kernel.writes}
    made.difference_update(a for a in opened.outvars if isinstance(a, Var))
    for kernel in second:
        if not fused(kernel):  # it would read an unpacked one from memory
            made.difference_update(kernel.reads)
    found: dict[Var, int] = {}
    for v in dict.fromkeys(v for kernel in second for v in kernel.reads if v in made):
        aval: Any = v.aval
        is_large = nbytes(aval) // shards.count(v) >= least
        axis = _axis(v, shards) if is_large and str(aval.dtype) == "bool" else None
        if axis is not None:
            found[v] = axis
    return found


def _axis(v: Var, shards: Shards) -> int | None:
    """The axis along which mask `v` is packed; None where there is none.

    The first one stays: sub-batches divide it, since the samples lie along it. So does what devices
    divide. Of the others it is the last one but the fastest, so that the eight rows of a byte lie
    close together and are read as they lie.
    """
    aval: Any = v.aval
    axes = range(1, aval.ndim)
    for axis in (*axes[-2::-1], *axes[-1:]):
        if aval.shape[axis] % BITS == 0 and not shards.is_split(v, axis):
            return axis
    return None


class _Packer:
    """A jaxpr, while its masks are packed."""

    def __init__(
        self,
        flat: ClosedJaxpr,
        first: Sequence[Kernel],
        second: Sequence[Kernel],
        masks: dict[Var, int],
    ) -> None:
        self.flat, self.masks = flat, masks
        self.opened = compat.open_jaxpr(flat)
        self.early = {i for kernel in first for i in kernel.equations}
        self.late = {i for kernel in second for i in kernel.equations} - self.early
        self.shared: dict[Var, JaxprEqn] = {}  # made of masks in kernels of both
        for kernel in second:
            for i in sorted(self.early.intersection(kernel.equations)):
                eqn = self.opened.eqns[i]
                if any(a in masks or a in self.shared for a in _variables(eqn)):
                    self.shared.update(dict.fromkeys(eqn.outvars, eqn))
        for v in masks:  # also where one is made of another
            self.shared.pop(v, None)
        self.everywhere = masks.keys() & set(_read_apart(first))
        self.bytes: dict[Var, Var] = {}  # of a mask
        self.own: dict[Var, Var] = {}  # of a mask, or what is shared, that of the second kernels
        self.equations: list[JaxprEqn] = []

    def run(self) -> ClosedJaxpr:
        for i, eqn in enumerate(self.opened.eqns):
            invars = [self._read(a, eqn, i in self.late) for a in eqn.invars]
            self.equations.append(eqn.replace(invars=invars))
            for v in self.masks.keys() & {*eqn.outvars}:
                self.bytes[v] = compat.new_var(packed_aval(v.aval, self.masks[v]))
                self._emit(pack_p, v, v, self.bytes[v], eqn)
        ours = self.opened
        parts = ours.constvars, compat.constants(self.flat), ours.invars, ours.outvars
        return compat.close(*parts, self.equations, like=self.flat)

    def _read(self, a: Atom, like: JaxprEqn, late: bool) -> Atom:
        """What equation `like` of the second kernels alone (`late`), or of others, reads as `a`."""
        if not isinstance(a, Var) or not (a in self.bytes or a in self.shared):
            return a
        if not late and a not in self.everywhere:
            return a
        if a not in self.own:
            if a in self.bytes:
                self.own[a] = compat.new_var(a.aval)
                self._emit(unpack_p, a, self.bytes[a], self.own[a], like)
            else:
                eqn = self.shared[a]
                outs = [compat.new_var(v.aval) for v in eqn.outvars]
                invars = [self._read(b, like, late) for b in eqn.invars]
                self.equations.append(eqn.replace(invars=invars, outvars=outs))
                self.own.update(zip(eqn.outvars, outs, strict=True))
        return self.own[a]

    def _emit(self, primitive: Any, mask: Var, given: Var, made: Var, like: JaxprEqn) -> None:
        params = {"axis": self.masks[mask]}
        self.equations.append(compat.new_equation(primitive, [given], [made], params, like))


def _read_apart(kernels: Sequence[Kernel]) -> Iterator[Var]:
    """What one of `kernels` makes and another reads from memory that does not read all that it is
    made of."""
    by = {v: kernel for kernel in kernels for v in kernel.writes}
    for kernel in kernels:
        for v in kernel.reads:
            if v in by and not {*by[v].reads} <= {*kernel.reads}:
                yield v


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [a for a in eqn.invars if isinstance(a, Var)]
