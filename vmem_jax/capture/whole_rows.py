"""whole_rows: batched products read and make rows that transposes leave whole, on a GPU.

`jnp.einsum` has the heads of attention as [samples, tokens, heads, size]. It writes what attention
returns as [samples, heads, size, tokens], a product of the values and the weights, and transposes
that; and so it reads the gradient. Gradients to keys and values are written likewise. Left to itself
XLA:GPU picks a layout for such a value, but a fence keeps what it states, and a pass in front of it
or behind moves single elements: three gradients of a Swin transformer's windows take 306 us on an
H200, and 140 where rows of 32 stay whole.

The same product of the weights and the values makes [samples, heads, tokens, size], and a product
sums over any dimension of what it reads.

Queries, keys and values are cut out of one array before they are transposed, and transposed for
products where they are cut out, so that their layout can be stated (`row_major`): XLA transposes the
whole, and copies each out of that (ViT-L, 64 images: 90 us for 38). Others are a product and a bias
each, as Flax makes them. Where rows are not aligned, they are transposed behind that: XLA lays the
keys out as [size, tokens] for the scores, and two products of the backward pass transpose what they
read. Four layers of Flax's ViT-L(128) take 19.9 ms so, and 19.6 where tokens come before sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.counted_masks import with_counted_masks
from vmem_jax.capture.def_use import readers
from vmem_jax.capture.editor import spliced
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.grouped_products import with_grouped_products
from vmem_jax.capture.padded_rows import Lengths, padded_length, with_padded_rows
from vmem_jax.capture.primitives import Class, class_of, nbytes, shape_of
from vmem_jax.capture.row_major import Spread, with_row_major
from vmem_jax.capture.shards import is_typed
from vmem_jax.capture.softmax_gradients import with_softmax_gradients
from vmem_jax.capture.transposed_convolutions import Spreading
from vmem_jax.capture.transposes import transposed
from vmem_jax.core.costs import Costs
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Program
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var

Readers = Mapping[Var, Sequence[int]]

_CUTS = ("slice", "unstack")
"""What cuts parts out of an array."""

_SIZE_FIRST = 0.8
"""The share of its rate that a product of unaligned heads reaches which XLA (0.11.2) lays out as
[size, tokens]. Of 64 images a ViT's of 197 tokens take 80 to 88 us on an H200, others 60 to 70.
Aligned ones take no longer."""


def with_whole_rows(flat: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """`flat` whose batched products read and make whole rows of what is transposed, but for those in
    the bodies of its loops.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
    """
    if platform != "gpu":
        return flat
    flat = _batches_first(_cut_first(flat))
    opened = compat.open_jaxpr(flat)
    eqns = [*opened.eqns]
    results = {a for a in opened.outvars if isinstance(a, Var)}
    read_by = readers(eqns)
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name == "transpose" and eqn.outvars[0] not in results:
            _read_by_rows(i, eqns, read_by)
    made: dict[int, Sequence[JaxprEqn]] = {}  # equation -> those in its place
    for i, eqn in enumerate(eqns):
        turned = _transposes_of(i, eqns, read_by, results)
        if turned and (pair := _made_by_rows(eqn, [eqns[j] for j in turned])) is not None:
            made |= {**dict.fromkeys(turned, ()), i: pair}
    every = [each for i, eqn in enumerate(eqns) for each in made.get(i, (eqn,))]
    parts = opened.constvars, compat.constants(flat), opened.invars, opened.outvars, every
    return compat.close(*parts, like=flat)


def _cut_first(flat: ClosedJaxpr) -> ClosedJaxpr:
    """`flat` whose transposed arrays are cut into slices before they are transposed, where nothing
    else reads them."""
    opened = compat.open_jaxpr(flat)
    results = {a for a in opened.outvars if isinstance(a, Var)}
    maker = {v: eqn for eqn in opened.eqns for v in eqn.outvars}
    read_by = readers(opened.eqns)
    eqns: list[JaxprEqn] = []
    for eqn in opened.eqns:
        whole: Any = eqn.invars[0] if eqn.primitive.name in _CUTS else None
        turned = maker.get(whole) if isinstance(whole, Var) else None
        is_turned = turned is not None and turned.primitive.name == "transpose"
        if turned is None or not is_turned or whole in results or is_typed(whole):
            eqns.append(eqn)
        elif all(opened.eqns[i].primitive.name in _CUTS for i in read_by[whole]):
            for i, out in enumerate(eqn.outvars):
                cut = functools.partial(_cut, eqn=eqn, order=turned.params["permutation"], i=i)
                eqns += spliced(cut, turned.invars, eqn, out)[0]
        else:
            eqns.append(eqn)
    parts = opened.constvars, compat.constants(flat), opened.invars, opened.outvars, eqns
    return drop_dead(compat.close(*parts, like=flat))


def _cut(x: jax.Array, eqn: JaxprEqn, order: Sequence[int], i: int) -> jax.Array:
    """Result `i` of `eqn`, which cuts `x` in another order of its dimensions."""
    params = eqn.params
    if eqn.primitive.name == "slice":
        strides = params["strides"] or (1,) * x.ndim
        ranges = [*zip(params["start_indices"], params["limit_indices"], strides, strict=True)]
        own = zip(*(ranges[order.index(d)] for d in range(x.ndim)), strict=True)
        return lax.transpose(lax.slice(x, *own), order)
    axis = order[params["axis"]]
    rest = [d - (d > axis) for d in order if d != axis]
    part = lax.squeeze(lax.slice_in_dim(x, i, i + 1, axis=axis), [axis])
    return part if rest == sorted(rest) else lax.transpose(part, rest)


def _batches_first(flat: ClosedJaxpr) -> ClosedJaxpr:
    """`flat` in which what is cut out or computed for batched products alone is transposed for them:
    to its batch dimensions first. What a product makes is read as it lies."""
    opened = compat.open_jaxpr(flat)
    results = {a for a in opened.outvars if isinstance(a, Var)}
    maker = {v: eqn for eqn in opened.eqns for v in eqn.outvars}
    read_by = readers(opened.eqns)
    turned: dict[tuple[Var, tuple[int, ...]], Var] = {}
    eqns: list[JaxprEqn] = []
    for eqn in opened.eqns:
        for side in (0, 1) if _multiplies_matrices(eqn) else ():
            a = eqn.invars[side]
            batch = eqn.params["dimension_numbers"][1][side]
            if not isinstance(a, Var) or a in results or not _is_written(a, batch, maker):
                continue
            if not all(_multiplies_matrices(opened.eqns[i]) for i in read_by[a]):
                continue
            aval: Any = a.aval
            order = (*batch, *(d for d in range(aval.ndim) if d not in batch))
            if order == tuple(sorted(order)):
                continue
            if (a, order) not in turned:
                turn = functools.partial(lax.transpose, permutation=order)
                made, turned[a, order] = spliced(turn, [a], eqn)
                eqns += made
            eqn = _with_operand(eqn, side, turned[a, order], order)
        eqns.append(eqn)
    parts = opened.constvars, compat.constants(flat), opened.invars, opened.outvars, eqns
    return compat.close(*parts, like=flat)


def _is_written(a: Var, batch: Sequence[int], maker: Mapping[Var, JaxprEqn]) -> bool:
    """Whether `a` is a part of an array, what a chain makes of unaligned rows, or a view of these."""
    eqn = maker.get(a)
    while eqn is not None and class_of(eqn) is Class.VIEW and isinstance(eqn.invars[0], Var):
        eqn = maker.get(eqn.invars[0])
    if eqn is None:
        return False
    matrix = (size for d, size in enumerate(shape_of(a)) if d not in batch)
    is_chain = class_of(eqn) is Class.FUSIBLE and any(map(padded_length, matrix))
    return is_chain or eqn.primitive.name in (*_CUTS, "split")


def _with_operand(product: JaxprEqn, side: int, a: Var, order: Sequence[int]) -> JaxprEqn:
    """`product` that reads `a`, whose dimensions are in `order`, in place of an operand."""
    invars = [*product.invars]
    invars[side] = a
    numbers = tuple(
        tuple(tuple(map(order.index, dims)) if s == side else dims for s, dims in enumerate(both))
        for both in product.params["dimension_numbers"]
    )
    return product.replace(invars=invars, params={**product.params, "dimension_numbers": numbers})


@dataclasses.dataclass(frozen=True)
class AsWritten:
    """What the step has otherwise as it was written.

    Attributes:
      spread: values whose layouts XLA chooses badly.
      turned: bytes that passes which transpose heads move more.
      lengths: of rows that are padded.
      spreading: transposed and dilated convolutions, and gradients to small tables.
    """

    spread: Spread = dataclasses.field(default_factory=Spread)
    turned: int = 0
    lengths: Lengths = dataclasses.field(default_factory=dict)
    spreading: Spreading = dataclasses.field(default_factory=dict)


def with_layouts(flat: ClosedJaxpr, platform: str) -> tuple[ClosedJaxpr, AsWritten]:
    """`flat` with whole and padded rows, counted masks and row-major values."""
    if platform != "gpu":
        return flat, AsWritten()
    rows, lengths = _with_rows(flat, platform)
    laid_out, spread = with_row_major(rows, platform)
    return laid_out, AsWritten(spread, _turned_nbytes(flat) - _turned_nbytes(laid_out), lengths)


def with_layouts_in_loops(body: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """The body of a loop of layers with whole and padded rows, and counted masks. XLA lays out what
    the loop itself carries and stacks row-major."""
    return _with_rows(body, platform)[0]


def _with_rows(flat: ClosedJaxpr, platform: str) -> tuple[ClosedJaxpr, Lengths]:
    """`flat` with whole and padded rows and counted masks, and the lengths that rows had."""
    grouped = with_softmax_gradients(with_grouped_products(flat, platform), platform)
    padded, lengths = with_padded_rows(with_whole_rows(grouped, platform), platform)
    return with_counted_masks(padded, platform), lengths


def _turned_nbytes(flat: ClosedJaxpr) -> int:
    """Bytes that passes read and write which XLA transposes heads in (`transposes`)."""
    found = transposed(compat.open_jaxpr(flat).eqns).items()
    return sum(2 * each.count * nbytes(v.aval) for v, each in found)


def as_turned(costs: Costs, program: Program, more: int, machine: Machine) -> Costs:
    """`costs` of `program`, whose rows are whole, for the step as it was written.

    Args:
      more: bytes that passes move there, over those of `program`.
      machine: whose memory moves them.
    """
    products = [s for s, step in enumerate(program.steps) if step.batched]
    whole = sum(program.steps[s].nbytes for s in products)
    seconds = [*costs.seconds]
    for s in products if more > 0 and whole else ():
        seconds[s] /= 1.0 if program.steps[s].aligned else _SIZE_FIRST
        seconds[s] += more / machine.bandwidth * program.steps[s].nbytes / whole
    return dataclasses.replace(costs, seconds=tuple(seconds))


def _multiplies_matrices(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a batch of products of matrices, whose types do not say how they are split."""
    if eqn.primitive.name != "dot_general" or any(map(is_typed, (*eqn.invars, *eqn.outvars))):
        return False
    contracted, batches = eqn.params["dimension_numbers"]
    batch = len(batches[0])
    ranks = {len(a.aval.shape) for a in eqn.invars}
    return batch > 0 and len(contracted[0]) == 1 and ranks == {batch + 2}


def _read_by_rows(i: int, eqns: list[JaxprEqn], read_by: Readers) -> None:
    """Has transpose `i` end with the rows of its operand, if batched products are all that reads it
    and they make the same of it then."""
    eqn = eqns[i]
    [turned], order = eqn.outvars, eqn.params["permutation"]
    at = order.index(len(order) - 1)  # where its operand's rows are
    products = [eqns[j] for j in read_by.get(turned, ())]
    if at == len(order) - 1 or not products or not all(map(_multiplies_matrices, products)):
        return
    moved = [d for d in range(len(order)) if d != at] + [at]
    again = [_reading(product, turned, moved) for product in products]
    if any(product is None for product in again):
        return
    aval: Any = turned.aval
    out = compat.new_var(aval.update(shape=tuple(aval.shape[d] for d in moved)))
    params = {**eqn.params, "permutation": tuple(order[d] for d in moved)}
    eqns[i] = eqn.replace(outvars=[out], params=params)
    for j, product in zip(read_by[turned], again, strict=True):
        assert product is not None, "each was looked at"
        invars = [out if a is turned else a for a in product.invars]
        eqns[j] = product.replace(invars=invars)


def _reading(product: JaxprEqn, turned: Var, moved: Sequence[int]) -> JaxprEqn | None:
    """`product` where the dimensions of `turned` lie as `moved`; None if it made something else."""
    contracted, batch = product.params["dimension_numbers"]
    contracted, batch = [*contracted], [*batch]
    for side, a in enumerate(product.invars):
        if a is not turned:
            continue
        own = {*contracted[side], *batch[side]}
        free = [d for d in moved if d not in own]
        if free != sorted(free) or moved[-1] in batch[side]:
            return None
        contracted[side] = tuple(map(moved.index, contracted[side]))
        batch[side] = tuple(map(moved.index, batch[side]))
    numbers = tuple(contracted), tuple(batch)
    return product.replace(params={**product.params, "dimension_numbers": numbers})


def _transposes_of(
    i: int, eqns: Sequence[JaxprEqn], read_by: Readers, results: set[Var]
) -> list[int]:
    """The transposes, one behind another, that are all that reads equation `i`, a batched product."""
    found: list[int] = []
    if not _multiplies_matrices(eqns[i]):
        return found
    [out] = eqns[i].outvars
    while out not in results and len(read_by.get(out, ())) == 1:
        [reader] = read_by[out]
        if eqns[reader].primitive.name != "transpose":
            break
        found.append(reader)
        [out] = eqns[reader].outvars
    return found


def _made_by_rows(product: JaxprEqn, turned: Sequence[JaxprEqn]) -> Sequence[JaxprEqn] | None:
    """What stands for `product` and the transposes `turned` of it: one product, and one transpose
    unless that is none; None where these would move no longer rows than now."""
    order = [*range(len(product.outvars[0].aval.shape))]
    for each in turned:
        order = [order[d] for d in each.params["permutation"]]
    contracted, batches = product.params["dimension_numbers"]
    batch = len(batches[0])
    rows = len(product.invars[0].aval.shape) - len(contracted[0]) - batch
    columns = len(order) - batch - rows
    if columns and order[-1] == batch + rows - 1:
        product = _exchanged(product, batch, rows)
        places = [*range(batch), *range(batch + rows, len(order)), *range(batch, batch + rows)]
        order = [places.index(d) for d in order]
    elif len(turned) == 1:
        return None
    [result] = turned[-1].outvars
    if order == sorted(order):
        return [product.replace(outvars=[result])]
    last = {**turned[-1].params, "permutation": tuple(order)}
    return [product, turned[-1].replace(invars=[*product.outvars], params=last)]


def _exchanged(product: JaxprEqn, batch: int, rows: int) -> JaxprEqn:
    """`product` with its operands exchanged: its result has the last dimensions before the `rows`."""
    params = product.params
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    numbers = (right, left), (right_batch, left_batch)
    precision = params["precision"]
    precision = precision[::-1] if isinstance(precision, tuple) else precision
    aval: Any = product.outvars[0].aval
    shape = aval.shape
    shape = *shape[:batch], *shape[batch + rows :], *shape[batch : batch + rows]
    every = {**params, "dimension_numbers": numbers, "precision": precision}
    out = compat.new_var(aval.update(shape=shape))
    return product.replace(invars=[*product.invars[::-1]], outvars=[out], params=every)
