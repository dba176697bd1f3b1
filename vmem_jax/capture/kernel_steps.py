"""kernel_steps: one kernel of a flat jaxpr -> a Step: bytes, flops, workspace, layer, epilogue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture import columns, odd_rows, product_waves
from vmem_jax.capture.bits import pack_p
from vmem_jax.capture.body_traffic import Traffic
from vmem_jax.capture.collectives import Collectives
from vmem_jax.capture.convolutions import match, match_epilogue
from vmem_jax.capture.counted_masks import counted_values
from vmem_jax.capture.cudnn_attention import BACKWARD, FORWARD, efficiency
from vmem_jax.capture.def_use import readers
from vmem_jax.capture.draws import draws_words
from vmem_jax.capture.inputs import Inputs
from vmem_jax.capture.kernels import Kernel
from vmem_jax.capture.locations import layer_of
from vmem_jax.capture.merged import Copied, copied
from vmem_jax.capture.primitives import (
    SCATTERS,
    Class,
    aligned,
    class_of,
    computed_in,
    flops,
    is_batched,
    nbytes,
    shape_of,
    workspace,
)
from vmem_jax.capture.product_workspaces import Size
from vmem_jax.capture.row_major import uncast_gradients
from vmem_jax.capture.shards import Shards
from vmem_jax.capture.softmax import makes_exponentials
from vmem_jax.capture.ties import COMPARISONS
from vmem_jax.capture.traffic import touched_nbytes
from vmem_jax.capture.transposes import transposed
from vmem_jax.core.body import body_nbytes
from vmem_jax.core.program import BEGIN, END, Phase, Program, Step
from vmem_jax.core.slowdown import slowdown
from vmem_jax.jax_compat import Var

_ON_CPU = frozenset(("conv_general_dilated",))
_ON_GPU = _ON_CPU | {
    "carried_product",
    "dot_general",
    "normalising_convolution",
    "pooled_windows",
    "reduced_rows",
    "spread_windows",
    "summed_rows",
    BACKWARD,
    FORWARD,
}
"""What a library computes. Its result is an element of a tuple, with a workspace, on a GPU, and XLA
reuses the memory of no such element for what reads it."""


_OF_OURS = {
    "carried_product": "carried",
    "pooled_windows": "pooled",
    "spread_windows": "spread",
    "summed_rows": "summed",
}
"""The parameter of each kernel of ours that says what it computes, and how fast."""

_PACKED = 0.76
"""What random words take in a kernel that packs the mask, of what they take otherwise: an H200 draws
and packs 134 million words of a GPT-2's scores in 438 µs and 26 million of a ViT-L's hidden layer in
86, 3.3 ps a word in place of 4.3."""


def libraries_of(platform: str) -> frozenset[str]:
    """The operations that a library computes where XLA compiles for `platform`."""
    return _ON_CPU if platform == "cpu" else _ON_GPU


class StepMaker:
    """Makes the steps of one Program.

    Args:
      eqns: of the flat jaxpr.
      kernels: all of it, in order.
      index: the buffer of each value that exists.
      shards: how values are split over devices.
      given: what is known of the step.
      is_body: whether they are an iteration of a loop.
    """

    def __init__(
        self,
        eqns: Sequence[compat.JaxprEqn],
        kernels: Sequence[Kernel],
        index: dict[Var, int],
        shards: Shards,
        given: Inputs,
        is_body: bool = False,
    ) -> None:
        self.eqns, self.index, self.shards, self.is_body = eqns, index, shards, is_body
        self.collectives = Collectives(eqns, shards)
        self._sizes: dict[Var, int] = {}
        self.maker = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.is_gpu = given.platform != "cpu"
        self.counted = counted_values(eqns) if self.is_gpu else set()
        self.products = given.products
        self.readers = readers(eqns)
        self.transposed = transposed(eqns) if self.is_gpu else {}
        self.copied = copied(eqns) if self.is_gpu else Copied({}, {})
        libraries = libraries_of(given.platform)
        # the library returns what it makes in a tuple, whatever is fused behind, and so does a copy
        # from host memory, and a reduction that writes a masked cotangent (`capture.masks`): XLA
        # writes over no part of one
        is_reduced = lambda eqn: class_of(eqn) is Class.REDUCE
        self.from_library = {
            v
            for kernel in kernels
            if eqns[kernel.root].primitive.name in libraries
            or _over_the_link(eqns[kernel.root], None)[0]
            or (
                is_reduced(eqns[kernel.root])
                and not all(is_reduced(self.maker[v]) for v in kernel.writes)
            )
            for v in kernel.writes
        }
        # of a library's clamp and a mask of it XLA would compare what the clamp is given: the library
        # returns that, and the clamp's result and the mask are written behind it; a barrier keeps it
        self.row_major = uncast_gradients(eqns)
        masks = [eqn for eqn in eqns if eqn.primitive.name in COMPARISONS]
        self.compared = {v for eqn in masks for v in eqn.invars if isinstance(v, Var)}

    def size(self, v: Var) -> int:
        """Bytes of `v` on one device."""
        if (found := self._sizes.get(v)) is None:
            found = self._sizes[v] = nbytes(v.aval) // self.shards.count(v)
        return found

    def step(
        self,
        kernel: Kernel,
        phase: Phase,
        body: Program | None,
        copied: Traffic,
    ) -> Step:
        """The step of `kernel`.

        Args:
          body: an iteration of it, if it is a loop.
          copied: what an iteration copies, if it is a loop.
        """
        eqns, index, shards, maker = self.eqns, self.index, self.shards, self.maker
        root = eqns[kernel.root]
        matched = match(root, maker) if shards.device_count == 1 else None
        convolution = None if matched is None else matched.convolution
        if matched is not None:
            behind = match_epilogue(matched, kernel.equations, kernel.root, eqns, maker)
            if behind is not None:
                convolution = matched.convolution.with_epilogue(behind.epilogue)
        size = self.size
        padded = 0 if convolution is None else convolution.padded_nbytes
        own = [eqns[i] for i in kernel.equations if class_of(eqns[i]) is not Class.VIEW]
        timed = [eqn for eqn in own if eqn is root or self.counted.isdisjoint(eqn.outvars)]
        fusible = class_of(root) is not Class.HEAVY
        reads = tuple(index[v] for v in kernel.reads)
        writes = tuple(index[v] for v in kernel.writes)
        values, written = (*kernel.reads, *kernel.writes), {*kernel.writes}
        sizes = {index[v]: size(v) for v in values}
        whole = [nbytes(v.aval) for v in shards.gathered(root)]
        received = sum(whole, shards.scattered_nbytes(root))
        carried = compat.scan_counts(root)[1] if root.primitive.name == "scan" else None
        stacks = () if carried is None else root.outvars[carried:]
        if body is None:
            own_nbytes = workspace(root, self._product_workspace)
        else:
            own_nbytes = body_nbytes(body, carried)
        in_place: list[tuple[int, int]] = []
        inside = sum(map(size, _inside(kernel, eqns)))
        has_epilogue = _has_epilogue(kernel, eqns)
        boundary = root.primitive.name in (BEGIN, END)
        if boundary:  # its results are its operands
            outs = root.outvars[1:] if root.primitive.name == BEGIN else root.outvars
            pairs = zip(root.invars, outs, strict=False)
            in_place = [(index[r], index[w]) for r, w in pairs if isinstance(r, Var) and r in index]
        elif class_of(root) in (Class.FUSIBLE, Class.VIEW):
            given = [index[v] for v in kernel.reads if v not in self.from_library]
            in_place = [(r, w) for w in writes for r in given if sizes[r] == sizes[w]]
        elif root.primitive.name == "scan":  # what it carries
            consts, carry = compat.scan_counts(root)
            pairs = zip(root.invars[consts : consts + carry], root.outvars, strict=False)
            in_place = [
                (index[r], index[w])
                for r, w in pairs
                if isinstance(r, Var) and r in index and w in index
            ]
        elif root.primitive.name == "dynamic_update_slice" or root.primitive.name in SCATTERS:
            over = [index[a] for a in root.invars[:1] if isinstance(a, Var) and a in kernel.reads]
            in_place = [(r, w) for w in writes[:1] for r in over if sizes[r] == sizes[w]]
        elif self.is_gpu and root.primitive.name == "dot_general":
            # it adds to what is carried
            added = [v for v in kernel.reads if self._is_carried(v) and v not in root.invars]
            in_place = [(index[v], w) for w in writes for v in added if sizes[index[v]] == sizes[w]]
        length = root.params["length"] if root.primitive.name == "scan" else 1
        copied_nbytes = 2 * length * copied.moved  # each is read and written
        fetched, returned = _over_the_link(root, body)
        with_copy = _is_part_of_copy(root)
        in_tile = lambda eqn: self.is_gpu and written.isdisjoint(eqn.outvars)
        computed = sum(flops(eqn, in_tile(eqn)) // shards.work(eqn) for eqn in timed)
        if any(eqn.primitive is pack_p for eqn in own) and any(map(draws_words, own)):
            computed = int(_PACKED * computed)
        touched = 0 if boundary or with_copy else touched_nbytes(kernel, eqns, size)
        elements = sum(size(v) // _itemsize(v.aval) for v in values)
        reduced = places = 0
        if self.is_gpu:
            if fusible and touched and not any(map(columns.is_reduction, own)):
                places = max((math.prod(shape_of(v)) for v in kernel.writes), default=0)
            reduced = columns.operations(own, elements, in_parts=shards.device_count == 1)
            reduced = max(reduced, odd_rows.operations(own, elements, shards))
        turned = [v for v in kernel.writes if v in self.transposed]
        copies = self._copies(kernel)
        recopied = self._is_recopied(kernel, phase)
        own_nbytes += sum(map(size, copies)) + (sum(map(size, kernel.writes)) if recopied else 0)
        return Step(
            reads=reads,
            writes=writes,
            equations=kernel.equations,
            op=next((eqn for eqn in own if draws_words(eqn)), root).primitive.name,
            phase=phase,
            fusible=fusible,
            flops=0 if with_copy else max(computed, reduced),
            written=0 if with_copy else places // shards.work(root),
            dtype="" if fusible else computed_in(root),
            aligned=aligned(root),
            efficiency=self._efficiency(kernel),
            nbytes=touched + copied_nbytes,
            copies=copied.copies if self.is_gpu else 0,
            fetches=copied.fetches if self.is_gpu else 0,
            workspace=inside if fusible else own_nbytes + received + padded + inside,
            pure=not boundary and not any(eqns[i].effects for i in kernel.equations),
            in_place=tuple(in_place),
            layer=layer_of(root) or _layer_of_loop(body),
            source=compat.user_line(root),
            convolution=convolution,
            epilogue_nbytes=2 * sum(sizes[w] for w in writes) if has_epilogue else 0,
            compared=tuple(index[v] for v in kernel.writes if has_epilogue and v in self.compared),
            tied=tuple(index[v] for v in kernel.tied),
            body=() if body is None else body.steps,
            length=length,
            behind=sum(2 * size(v) * self.transposed[v].count for v in turned)
            + self._added_behind(kernel),
            behind_aligned=all(self.transposed[v].aligned for v in turned),
            copied=tuple(index[v] for v in copies),
            stacked=tuple(index[v] for v in stacks if v in kernel.writes),
            recopied=recopied,
            sent=self.collectives.sent(root, phase),
            fetched=fetched,
            returned=returned,
            row_major=not self.row_major.isdisjoint(kernel.writes),
            batched=is_batched(root),
            normalises=self.is_gpu and makes_exponentials(root, self.maker),
            launched=not with_copy,
        )

    def _product_workspace(self, eqn: compat.JaxprEqn) -> int:
        """Bytes that are live only while the matrix product `eqn` runs on one device."""
        size = Size.of(eqn) if self.shards.device_count == 1 else None
        return self.products.workspace(flops(eqn) / self.shards.work(eqn), size)

    def _copies(self, kernel: Kernel) -> list[Var]:
        """What it reads in copies of another layout."""
        found = dict.fromkeys(map(self._stored, self._operands_copied(kernel)))
        return [v for v in found if v in kernel.reads]

    def _operands_copied(self, kernel: Kernel) -> tuple[Var, ...]:
        outvars = self.eqns[kernel.root].outvars
        return self.copied.operands.get(outvars[0], ()) if outvars else ()

    def _stored(self, v: Var) -> Var:
        """What `v` is a view of."""
        while v not in self.index and (eqn := self.maker.get(v)) and isinstance(eqn.invars[0], Var):
            v = eqn.invars[0]
        return v

    def _is_recopied(self, kernel: Kernel, phase: Phase) -> bool:
        """Whether what it makes is copied behind it. What computes something of it can transpose it,
        but for a cotangent, which a barrier separates from that."""
        [*writes] = kernel.writes
        if len(writes) != 1 or writes[0] not in self.copied.results:
            return False
        return phase is Phase.BACKWARD or not self.copied.results[writes[0]]

    def _added_behind(self, kernel: Kernel) -> int:
        """Bytes that adding to a product takes, of what is made elsewhere.

        One chain that reads the sum adds itself. The first of several writes it as well. In front of
        another library kernel it is a pass of its own.
        """
        root = self.eqns[kernel.root]
        if root.primitive.name != "dot_general" or not self.is_gpu:
            return 0
        own = [self.eqns[i] for i in kernel.equations]
        within = {v for eqn in own for v in eqn.outvars}
        added = (a for eqn in own if eqn.primitive.name in ("add", "add_any") for a in eqn.invars)
        others = (a for a in added if isinstance(a, Var) and not self._is_carried(a))
        made = {a for a in others if self._stored(a) in self.maker}
        moved = sum(map(self.size, made - within))
        [out] = kernel.writes
        chains = [class_of(eqn) is not Class.HEAVY for eqn in self._readers(out)]
        passes = 2 if not any(chains) else 0 if chains == [True] else 1
        return moved + passes * self.size(out) if moved else 0

    def _is_carried(self, v: Var) -> bool:
        """Whether `v` is carried into an iteration, or is a total so far of sub-batches."""
        made = self.maker.get(v)
        if made is None or made.primitive.name != BEGIN:
            return self.is_body and made is None
        entered = len(made.invars) - made.params["started"]
        return v in made.outvars[1 + entered :]

    def _readers(self, v: Var) -> Iterator[compat.JaxprEqn]:
        """What reads `v` and views of it."""
        for eqn in map(self.eqns.__getitem__, self.readers.get(v, ())):
            if class_of(eqn) is Class.VIEW:
                yield from self._readers(eqn.outvars[0])
            else:
                yield eqn

    def _efficiency(self, kernel: Kernel) -> float:
        root = self.eqns[kernel.root]
        if root.primitive.name == "normalising_convolution" and self.is_gpu:
            return 1 / slowdown(root.params["convolution"])
        described = _OF_OURS.get(root.primitive.name)
        if described is not None and self.is_gpu:
            return float(root.params[described].efficiency)
        if root.primitive.name == "dot_general" and self.is_gpu and self.shards.device_count == 1:
            return product_waves.share(Size.of(root), self.products.cores)
        return efficiency(root)


def _itemsize(aval: Any) -> int:
    """Bytes of an element; 1 for those of float0, which take none."""
    return int(getattr(getattr(aval, "dtype", None), "itemsize", 4)) or 1


def _over_the_link(eqn: compat.JaxprEqn, body: Program | None) -> tuple[int, int]:
    """Bytes that `eqn` copies from host memory, and to it."""
    if body is not None:
        length = eqn.params["length"]
        over = [(step.times * step.fetched, step.times * step.returned) for step in body.steps]
        return length * sum(n for n, _ in over), length * sum(n for _, n in over)
    if eqn.primitive.name != "device_put":
        return 0, 0
    ins, outs = ([v.aval for v in values] for values in (eqn.invars, eqn.outvars))
    fetches, returns = (any(map(compat.is_in_host_memory, avals)) for avals in (ins, outs))
    if fetches == returns:
        return 0, 0
    return sum(map(nbytes, outs)), sum(map(nbytes, ins))


def _is_part_of_copy(eqn: compat.JaxprEqn) -> bool:
    """Whether `eqn` says where in a stack in host memory a slice is copied from, or to."""
    slices = eqn.primitive.name in ("dynamic_slice", "dynamic_update_slice")
    return slices and compat.is_in_host_memory(eqn.invars[0].aval)


def _layer_of_loop(body: Program | None) -> str:
    """The layers of the steps of a body by the first parts of their names, "attention, mlp"."""
    steps = () if body is None else body.steps
    names = dict.fromkeys(step.layer.split("/")[0] for step in steps if step.layer)
    return ", ".join(names)


def _inside(kernel: Kernel, eqns: Sequence[compat.JaxprEqn]) -> set[Var]:
    """What heavy equations of a tie make and read that is no result or operand of it."""
    if not kernel.tied:
        return set()
    heavy = [eqns[i] for i in kernel.equations if class_of(eqns[i]) is Class.HEAVY]
    values = {a for eqn in heavy for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var)}
    return values.difference(kernel.reads, kernel.writes)


def _has_epilogue(kernel: Kernel, eqns: Sequence[compat.JaxprEqn]) -> bool:
    root = eqns[kernel.root]
    if class_of(root) is not Class.HEAVY or kernel.writes == tuple(root.outvars) or kernel.tied:
        return False
    behind = [eqns[i] for i in kernel.equations if i > kernel.root]
    return any(class_of(eqn) is not Class.VIEW for eqn in behind)
