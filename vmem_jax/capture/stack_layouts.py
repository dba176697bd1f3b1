"""stack_layouts: states the layout of what loops stack for the products that read it.

XLA chooses a layout for each loop. The product that makes the attention scores of grouped queries
lays them out as [batch, key head, token, query of the group, key]; the product that reads the weights
in the backward loop sums over both (query, token), in the order in which its dimension numbers name
them, and so wants [batch, key head, query, token, key]. XLA (0.11.2) then copies the whole stack
between the loops: a second stack in memory, and its time. Inside of an iteration the same copy is
one slice, and most often part of a fused kernel.

So the forward body transposes the value to the order in which the product reads it, and states that
this is how it lies in memory; the backward body states it of the slice, and transposes it back.
Slices are then also contiguous, and XLA hands them to the product where they lie in the stack.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.primitives import ELEMENTWISE, Class, class_of, shape_of
from vmem_jax.capture.row_major import laid_out
from vmem_jax.capture.shards import is_typed
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var

Order = tuple[int, ...]
"""The dimensions of a value from the slowest to the fastest."""


def with_stack_layouts(flat: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """`flat` whose loops, and those in their bodies, stack values in the order in which products of
    the loops behind them read them. On a CPU XLA lays out nothing, and `flat` is returned.

    Args:
      platform: that it is compiled for.
    """
    return _stated(flat) if platform == "gpu" else flat


def _stated(flat: ClosedJaxpr) -> ClosedJaxpr:
    opened = compat.open_jaxpr(flat)
    eqns = [_with_inner(e) if e.primitive.name == "scan" else e for e in opened.eqns]
    orders = _orders(eqns, {a for a in opened.outvars if isinstance(a, Var)})
    if orders:
        moved = {
            v: compat.new_var(_permuted(v.aval, (0, *(d + 1 for d in order))))
            for v, order in orders.items()
        }
        touches = lambda e: any(isinstance(a, Var) and a in orders for a in (*e.invars, *e.outvars))
        eqns = [_with_orders(e, orders, moved) if touches(e) else e for e in eqns]
    parts = opened.constvars, compat.constants(flat), opened.invars, opened.outvars, eqns
    return compat.close(*parts, like=flat)


def _with_inner(eqn: JaxprEqn) -> JaxprEqn:
    body = eqn.params["jaxpr"]
    if not any(e.primitive.name == "scan" for e in compat.open_jaxpr(body).eqns):
        return eqn
    return eqn.replace(params={**eqn.params, "jaxpr": _stated(body)})


def _orders(eqns: Sequence[JaxprEqn], results: set[Var]) -> dict[Var, Order]:
    """For each stack that a scan makes and only scans read, slice by slice, the order of a slice in
    which it is read. Left out are those that lie so anyway, those in host memory, and those whose
    types say how each dimension is split over devices."""
    readers: dict[Var, list[tuple[JaxprEqn, int]]] = {}
    for eqn in eqns:
        for p, a in enumerate(eqn.invars):
            if isinstance(a, Var):
                readers.setdefault(a, []).append((eqn, p))
    found = {}
    for eqn in eqns:
        if eqn.primitive.name != "scan" or eqn.effects:
            continue
        body = compat.open_jaxpr(eqn.params["jaxpr"])
        _, carry = compat.scan_counts(eqn)
        for v, x in zip(eqn.outvars[carry:], body.outvars[carry:], strict=True):
            read = readers.get(v, [])
            if not isinstance(x, Var) or v in results or is_typed(v):
                continue
            if compat.is_in_host_memory(v.aval) or not read or not all(map(_slices, read)):
                continue
            bodies = [(compat.open_jaxpr(r.params["jaxpr"]), p) for r, p in read]
            natural = tuple(range(len(shape_of(x))))
            wanted = [read_order(b, b.invars[p]) for b, p in bodies]
            order = next(filter(None, wanted), None)
            if order is not None and {order, made_order(body, x) or natural} != {natural}:
                found[v] = order
    return found


def _slices(use: tuple[JaxprEqn, int]) -> bool:
    """Whether it is a scan, and reads the operand slice by slice."""
    eqn, p = use
    is_scan = eqn.primitive.name == "scan" and not eqn.effects
    return is_scan and p >= sum(compat.scan_counts(eqn))


def read_order(body: Any, v: Var) -> Order | None:
    """The order in which the first product of `body` reads `v`; None if none does.

    A product that reads `v` itself comes before one that reads what is computed of it element by
    element: a fused kernel can write in another order than it reads.
    """
    elementwise: Order | None = None
    lies: dict[Any, tuple[Order, bool]] = {v: (tuple(range(len(shape_of(v)))), True)}
    for eqn in body.eqns:
        for side, a in enumerate(eqn.invars):
            if not isinstance(a, Var) or a not in lies:
                continue
            dims, is_itself = lies[a]
            if eqn.primitive.name == "dot_general":
                order = tuple(dims[d] for d in _operand_order(eqn, side, dims.index(len(dims) - 1)))
                if is_itself:
                    return order
                elementwise = elementwise or order
            elif eqn.primitive.name == "transpose":
                lies[eqn.outvars[0]] = tuple(dims[d] for d in eqn.params["permutation"]), is_itself
            elif eqn.primitive.name == "optimization_barrier":
                lies[eqn.outvars[side]] = lies[a]
            elif _keeps_dims(eqn, a):
                lies.setdefault(eqn.outvars[0], (dims, False))
    return elementwise


def made_order(body: Any, v: Var) -> Order | None:
    """The order in which a product of `body` makes `v`, or what `v` is computed of element by
    element; None if none does."""
    maker = {out: eqn for eqn in body.eqns for out in eqn.outvars}
    dims, at = tuple(range(len(shape_of(v)))), v  # dimension d of `v` is dims[d] of `at`
    while at in maker:
        eqn = maker[at]
        if eqn.primitive.name == "dot_general":
            return tuple(dims.index(d) for d in range(len(dims)))
        if eqn.primitive.name == "transpose":
            dims, before = tuple(eqn.params["permutation"][d] for d in dims), eqn.invars[0]
        elif eqn.primitive.name == "optimization_barrier":
            before = eqn.invars[eqn.outvars.index(at)]
        else:  # what is broadcast is not the product
            same = [a for a in eqn.invars if isinstance(a, Var) and _keeps_dims(eqn, a)]
            same = [a for a in same if a in maker and not _is_broadcast(maker[a])]
            before = same[0] if same else None
        if not isinstance(before, Var):
            return None
        at = before
    return None


def _keeps_dims(eqn: JaxprEqn, a: Var) -> bool:
    is_elementwise = eqn.primitive.name in ELEMENTWISE and len(eqn.outvars) == 1
    return is_elementwise and shape_of(eqn.outvars[0]) == shape_of(a)


def _is_broadcast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("broadcast_in_dim", "iota")


def _operand_order(eqn: JaxprEqn, side: int, last: int) -> Order:
    """The order in which a library's product takes an operand of `eqn`: the batch first, then what it
    sums over or what it does not, whichever leaves dimension `last` the fastest."""
    contract, batch = eqn.params["dimension_numbers"]
    rank = len(shape_of(eqn.invars[side]))
    summed, parts = tuple(contract[side]), tuple(batch[side])
    free = tuple(d for d in range(rank) if d not in summed and d not in parts)
    return parts + (free + summed if summed[-1:] == (last,) else summed + free)


def _permuted(aval: Any, order: Order) -> Any:
    return aval.update(shape=tuple(aval.shape[d] for d in order))


def _with_orders(eqn: JaxprEqn, orders: Mapping[Var, Order], moved: Mapping[Var, Var]) -> JaxprEqn:
    """The scan `eqn` with the stacks of `moved` in place of those of `orders`."""
    consts, carry = compat.scan_counts(eqn)
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    given, results = [*body.invars], [*body.outvars]
    eqns: list[JaxprEqn] = []
    calls = Calls(eqns.append)
    here: dict[Var, Var] = {}  # what stands for a value of the body from there on
    read = lambda a: here.get(a, a) if isinstance(a, Var) else a
    for p, a in enumerate(eqn.invars):
        if p >= consts + carry and isinstance(a, Var) and a in orders:
            x, order = body.invars[p], orders[a]
            given[p] = compat.new_var(_permuted(x.aval, order))
            like = body.eqns[0] if body.eqns else eqn
            [here[x]] = calls.bind(functools.partial(_back, order), [given[p]], like)
    stacked: dict[Var, list[int]] = {}
    for r, v in enumerate(eqn.outvars):
        if v in orders:
            stacked.setdefault(body.outvars[r], []).append(r)

    def stack(x: Var, like: JaxprEqn) -> None:
        for r in stacked.get(x, ()):
            order = orders[eqn.outvars[r]]
            [results[r]] = calls.bind(functools.partial(_there, order), [read(x)], like)
            if class_of(like) is not Class.HEAVY:  # the iteration reads what is stacked
                [here[x]] = calls.bind(functools.partial(_turned, order), [results[r]], like)

    for x in body.invars:
        stack(x, eqn)
    for inner in body.eqns:
        eqns.append(inner.replace(invars=[read(a) for a in inner.invars]))
        for x in inner.outvars:
            stack(x, inner)
    stacks = {r for rs in stacked.values() for r in rs}
    results = [a if r in stacks else read(a) for r, a in enumerate(results)]
    closed = eqn.params["jaxpr"]
    parts = body.constvars, compat.constants(closed), given, results, eqns
    return eqn.replace(
        invars=[moved.get(a, a) if isinstance(a, Var) else a for a in eqn.invars],
        outvars=[moved.get(v, v) for v in eqn.outvars],
        params={**eqn.params, "jaxpr": compat.close(*parts, like=closed)},
    )


def _there(order: Order, x: jax.Array) -> jax.Array:
    """`x` in `order`, as it is stacked."""
    return laid_out(x.transpose(order))


def _turned(order: Order, y: jax.Array) -> jax.Array:
    """What is `y` in `order`."""
    return y.transpose(tuple(order.index(d) for d in range(len(order))))


def _back(order: Order, y: jax.Array) -> jax.Array:
    """The value whose slice of the stack is `y`."""
    return _turned(order, laid_out(y))
