"""row_major: states the layout of small values that XLA:GPU would spread over large ones.

A product or a convolution has a layout that it likes for what it reads and makes. XLA (0.11.2) gives
it to all that is computed of that element by element, as far back and on as this goes, and transposes
at the ends. So what one small kernel likes lays out much more:

- cuDNN makes the gradient to a kernel with the output channels first (OHWI). The optimiser takes
  that layout: it reads weights and moments one element of each 32-byte sector at a time, and cannot
  write over them, so that all are copied. Of 3 x 3 taps and 1,280 x 1,280 channels AdamW takes 530
  us on an H200, and 125 with the layout stated; a U-Net's step takes 69 ms for 79.
- A classifier reads one token of each sample. For its weights' gradient, a sum over samples, these
  come last, and so they do in the whole residual stream, unless loops cut it: all products of an
  unrolled ViT read and make transposed copies of what its norms do. ViT-L(64) takes 75 ms for 78,
  and 17.5 GiB for 20.6, with the layout stated.
- What a product makes of each sample is spread over its tokens, as the shifts and scales of a DiT
  are, and their gradients are summed over these. The product likes the samples last, a sum what it
  sums; and so all the residual stream is laid out. A DiT-B/2(128) moves 130 GiB in its fences for
  118 with the layouts stated, and plain jit 122.
- An argument has its layout, and what is transposed of it another one. Labels [samples, tokens]
  beside logits [tokens, samples, words] so lay out the logits, which the products around them do not.
  Fences keep these in memory, and each product reads or makes a transposed copy: of a recurrent
  network of 512 units and 1,000 words one is 4 % of the need. Without fences casts transpose them.
- What a chain transposes for a product lies in a fence as the chain's operands do. The product reads
  a copy behind it, and one in front: of a Swin transformer's windows and heads copies take 3.4 of
  16.9 ms on an H200, and 1.6 without fences. What is transposed between products each of these copies
  for itself.

Stated to be row-major, a gradient is transposed in the kernel that reads it first, a part of a value
where it is cut out, an argument by itself, and what a chain transposes where the chain writes it. A
plan may take the statement of a gradient back where a convolution reads the very weights, and these
would be there beside their copies in cuDNN's order (`core.stated_layouts`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from vmem_jax import jax_compat as compat
from vmem_jax.capture.convolutions import match
from vmem_jax.capture.def_use import readers
from vmem_jax.capture.editor import spliced
from vmem_jax.capture.primitives import Class, class_of, exchanges_operands, is_batched
from vmem_jax.capture.shards import is_typed
from vmem_jax.capture.transposes import moves_elements, moves_rows
from vmem_jax.core.convolution import Pass
from vmem_jax.core.costs import Costs
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Program
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var

_PART = 8
"""A part this many times smaller than what it is cut out of may be transposed: that takes less than
an eighth of one pass over the whole."""

_PRODUCTS = ("dot_general", "conv_general_dilated")

_PARTS = ("pad", "concatenate", "dynamic_update_slice")
"""What makes parts of an array."""

_SECTOR = 32
"""Bytes that a GPU reads at least, of which a read across rows uses one element."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """The values of a flat jaxpr whose layouts are stated.

    Attributes:
      gradients: those to kernels of convolutions, as they are made.
      wholes: those of which a part is cut out.
    """

    gradients: frozenset[Var] = frozenset()
    wholes: frozenset[Var] = frozenset()


def with_row_major(flat: ClosedJaxpr, platform: str) -> tuple[ClosedJaxpr, Spread]:
    """`flat` with the layouts of what XLA would spread stated, and what that is. What stands in loops
    is left alone: XLA lays out what a loop carries and stacks row-major.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
    """
    if platform != "gpu":
        return flat, Spread()
    opened = compat.open_jaxpr(flat)
    eqns: list[JaxprEqn] = []
    here: dict[Var, Var] = {}
    read = lambda a: here.get(a, a) if isinstance(a, Var) else a
    gradients: set[Var] = set()
    wholes: set[Var] = set()
    results = {a for a in opened.outvars if isinstance(a, Var)}  # whose layouts are given
    computed = _computed(opened.eqns)
    turned = _turned(opened.eqns, computed) | _written_transposed(opened.eqns)
    stated = turned | _of_samples(opened.eqns) | _put_together(opened.eqns)
    for eqn in opened.eqns:
        is_gradient = _is_kernel_gradient(eqn) and eqn.outvars[0] not in results
        is_part = _is_small_part(eqn) and eqn.invars[0] in computed
        eqn = eqn.replace(invars=[*map(read, eqn.invars)])
        eqns.append(eqn)
        if is_gradient or is_part or not stated.isdisjoint(eqn.outvars):
            [made] = eqn.outvars
            constraint, here[made] = spliced(laid_out, [made], eqn)
            eqns += constraint
            if is_gradient:
                gradients.add(made)
            elif is_part:
                wholes.add(eqn.invars[0])
    if not here:
        return flat, Spread()
    outs = [*map(read, opened.outvars)]
    parts = opened.constvars, compat.constants(flat), opened.invars, outs, eqns
    return compat.close(*parts, like=flat), Spread(frozenset(gradients), frozenset(wholes))


def _computed(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """What products make, and what is made of that."""
    found: set[Var] = set()
    for eqn in eqns:
        read = (a for a in eqn.invars if isinstance(a, Var))
        if class_of(eqn) is Class.HEAVY or not found.isdisjoint(read):
            found.update(eqn.outvars)
    return found


def _turned(eqns: Sequence[JaxprEqn], computed: Set[Var]) -> set[Var]:
    """Transposed arguments with which values are computed that are `_PART` times as large, but for
    those that a product reads: it takes any layout.

    Args:
      computed: as `_computed` has it; the rest are arguments, or made of these alone.
    """
    made_of: dict[
        Var, frozenset[Var]
    ] = {}  # value -> of which of them it is made, and not much larger
    found: set[Var] = set()
    free: set[Var] = set()
    for eqn in eqns:
        read = [a for a in eqn.invars if isinstance(a, Var)]
        sources = frozenset().union(*(made_of.get(a, ()) for a in read))
        if eqn.primitive.name in _PRODUCTS:
            free |= sources
        if _turns(eqn) and eqn.outvars[0] not in computed:
            sources |= {eqn.outvars[0]}
        for v in (*read, *eqn.outvars):
            much_larger = {source for source in sources if _PART * _size(source) <= _size(v)}
            found |= much_larger
            made_of.setdefault(v, sources - much_larger)
    return found - free


def _of_samples(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Features of samples that products make and which are spread over `_PART` times larger values,
    and such values whose sums products read; but for results of loops, which XLA has row-major."""
    made_of: dict[Var, frozenset[Var]] = {}  # value -> the features and sums that it is made of
    found: set[Var] = set()
    products: set[Var] = set()
    for eqn in eqns:
        read = [a for a in eqn.invars if isinstance(a, Var)]
        sources = frozenset().union(*(made_of.get(a, ()) for a in read))
        size = max(map(_size, eqn.outvars), default=0)
        if eqn.primitive.name in _PRODUCTS:
            found |= sources - products
            products.update(eqn.outvars)
            made_of[eqn.outvars[0]] = frozenset(eqn.outvars)
        elif _sums_rows(eqn):
            made_of[eqn.outvars[0]] = frozenset(read)
        elif class_of(eqn) is not Class.HEAVY:
            spread = {v for v in sources if _PART * _size(v) <= size}
            found |= spread & products
            made_of |= dict.fromkeys(eqn.outvars, sources - spread)
    alone = {eqn.outvars[0] for eqn in eqns if len(eqn.outvars) == 1}
    return {v for v in found & alone if not is_typed(v)}


def _put_together(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Transposed products, as gradients to weights are written, that become parts of an array."""
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    read_by = readers(eqns)

    def becomes_part(v: Var) -> bool:
        for eqn in (eqns[i] for i in read_by.get(v, ())):
            if eqn.primitive.name in _PARTS:
                return True
            [out, *_] = eqn.outvars
            if class_of(eqn) in (Class.VIEW, Class.FUSIBLE) and _size(out) == _size(v):
                return becomes_part(out)
        return False

    exchanged = (
        eqn.outvars[0]
        for eqn in eqns
        if eqn.primitive.name == "transpose"
        and eqn.invars[0] in maker
        and exchanges_operands(maker[eqn.invars[0]], eqn)
    )
    return {v for v in exchanged if not is_typed(v) and becomes_part(v)}


def _sums_rows(eqn: JaxprEqn) -> bool:
    """Whether `eqn` makes features of samples, of many rows each."""
    if eqn.primitive.name != "reduce_sum":
        return False
    whole, part = eqn.invars[0].aval, eqn.outvars[0].aval
    keeps_features = whole.ndim - 1 not in eqn.params["axes"]
    return keeps_features and part.ndim > 1 and _PART * part.size <= whole.size


def _turns(eqn: JaxprEqn) -> bool:
    """Whether `eqn` moves the elements of an array in memory."""
    is_plain = eqn.primitive.name == "transpose" and not is_typed(eqn.outvars[0])
    return is_plain and moves_elements(eqn)


def _written_transposed(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """What is transposed of what a chain makes for that alone, and read by a product; and of what a
    batched product does, and read by several others."""
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    read_by = readers(eqns)

    def needed(v: Any) -> float:
        """How many products have to read it, by what makes `v`, or what it is a view of."""
        if not isinstance(v, Var) or v not in maker or len(read_by[v]) != 1:
            return math.inf
        eqn = maker[v]
        if class_of(eqn) is Class.VIEW:
            return needed(eqn.invars[0])
        return 1 if class_of(eqn) is Class.FUSIBLE else 2 if is_batched(eqn) else math.inf

    def products(v: Var) -> int:
        """Those that read `v`, or a view of it."""
        each = [eqns[i] for i in read_by.get(v, ())]
        views = (eqn.outvars[0] for eqn in each if class_of(eqn) is Class.VIEW)
        return sum(map(products, views)) + sum(e.primitive.name in _PRODUCTS for e in each)

    moved = (e for e in eqns if e.primitive.name == "transpose" and moves_rows(e))
    return {
        eqn.outvars[0]
        for eqn in moved
        if not is_typed(eqn.outvars[0]) and products(eqn.outvars[0]) >= needed(eqn.invars[0])
    }


def _size(v: Var) -> int:
    return math.prod(getattr(v.aval, "shape", ()))


def uncast_gradients(eqns: Sequence[JaxprEqn]) -> frozenset[Var]:
    """The gradients to kernels that `eqns` state to be row-major and do not cast."""
    of = lambda name: (eqn for eqn in eqns if eqn.primitive.name == name)
    cast = {a for eqn in of("convert_element_type") for a in eqn.invars if isinstance(a, Var)}
    stated = {eqn.invars[0] for eqn in of("layout_constraint") if eqn.outvars[0] not in cast}
    made = (eqn for eqn in of("conv_general_dilated") if eqn.outvars[0] in stated)
    return frozenset(eqn.outvars[0] for eqn in made if _is_kernel_gradient(eqn))


def laid_out(x: jax.Array) -> jax.Array:
    """`x`, whose elements lie in memory as its dimensions are."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _is_kernel_gradient(eqn: JaxprEqn) -> bool:
    """Whether `eqn` makes the gradient to a kernel of several channels each way, whose dimensions are
    not in cuDNN's order."""
    matched = match(eqn, {})
    if matched is None or is_typed(eqn.outvars[0]):
        return False
    c, (features_in, features_out, *taps) = matched.convolution, matched.numbers.out_spec
    if c.which != Pass.BACKWARD_FILTER or c.groups > 1 or not c.channels_last:
        return False
    return [features_out, *taps, features_in] != [*range(eqn.outvars[0].aval.ndim)]


def _is_small_part(eqn: JaxprEqn) -> bool:
    """Whether `eqn` cuts a small part out of floating-point numbers."""
    if eqn.primitive.name not in ("slice", "dynamic_slice"):
        return False
    whole, part = eqn.invars[0].aval, eqn.outvars[0].aval
    if not jnp.issubdtype(whole.dtype, jnp.floating) or is_typed(eqn.outvars[0]):
        return False
    return whole.ndim > 1 and _PART * math.prod(part.shape) <= math.prod(whole.shape)


def as_spread(
    costs: Costs, program: Program, variables: tuple[Var, ...], spread: Spread, machine: Machine
) -> Costs:
    """`costs` of `program`, whose layouts are stated, for the step as it was written.

    Args:
      variables: of each buffer.
      machine: whose memory moves what is copied and read across rows.
    """
    if not spread.gradients and not spread.wholes:
        return costs
    shape: Mapping[int, Any] = {b: getattr(v.aval, "shape", ()) for b, v in enumerate(variables)}
    turned = {b for b, v in enumerate(variables) if v in spread.gradients}
    wholes = {getattr(v.aval, "shape", ()) for v in spread.wholes}
    size = lambda b: program.buffers[b].nbytes
    seconds = []
    for own, step in zip(costs.seconds, program.steps, strict=True):
        more = 0.0
        values = (*step.reads, *step.writes)
        alike = {shape[b] for b in turned.intersection(step.reads) if step.fusible}
        if alike:  # of an update, which lies as its gradient does
            across = [b for b in step.reads if shape[b] in alike and b not in turned]
            made = [b for b in step.writes if shape[b] in alike]
            more += sum((_SECTOR / _itemsize(variables[b]) - 1) * size(b) for b in across)
            more += sum(2 * size(b) for b in made)
            turned.update(made)
        if not step.fusible:  # transposed before or behind
            more += sum(2 * size(b) for b in values if shape[b] in wholes)
        seconds.append(own + step.times * more / machine.bandwidth)
    return dataclasses.replace(costs, seconds=tuple(seconds))


def _itemsize(v: Atom) -> int:
    return int(getattr(v.aval.dtype, "itemsize", 4))
