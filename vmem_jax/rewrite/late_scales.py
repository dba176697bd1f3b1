"""late_scales: dropout scales what it keeps behind the mask, not in front of it.

Flax divides what a layer makes by the share that is kept, and then selects. XLA:GPU (0.11.2) takes a
bias and the division behind a product into one kernel of Triton's. Where cuBLAS is faster, that adds
the bias, and the division is left as a pass of its own: so a ViT-L in four sub-batches reads and
writes the results of two dropouts a layer once more, 1.7 % of its time on an H200. Behind the mask
the division is part of the kernel that selects. No bit differs: what is dropped is zero, and stays
zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vmem_jax import jax_compat as compat
from vmem_jax.capture.def_use import readers
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

_FILLS = ("broadcast_in_dim", "convert_element_type")


def with_late_scales(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with each scale of which only a selection beside zeros is read behind that selection,
    in the bodies of its loops, too."""
    opened = compat.open_jaxpr(closed)
    maker = {v: eqn for eqn in opened.eqns for v in eqn.outvars}
    read_once = {v for v, at in readers(opened.eqns).items() if len(at) == 1}
    read_once -= {a for a in opened.outvars if isinstance(a, Var)}
    eqns: list[JaxprEqn] = []
    early: set[Var] = set()  # scales that a later one stands for
    for eqn in opened.eqns:
        scale = _scale(eqn, maker)
        if eqn.primitive.name == "scan":
            body = with_late_scales(eqn.params["jaxpr"])
            eqns.append(eqn.replace(params={**eqn.params, "jaxpr": body}))
        elif scale is None or scale.outvars[0] not in read_once:
            eqns.append(eqn)
        else:
            early.add(scale.outvars[0])
            eqns += _behind(eqn, scale)
    eqns = [eqn for eqn in eqns if early.isdisjoint(eqn.outvars)]
    parts = opened.constvars, compat.constants(closed), opened.invars, opened.outvars, eqns
    return compat.close(*parts, like=closed)


def _scale(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """What makes the scaled value that `eqn` selects, if it selects between that and zeros."""
    if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return None
    for scaled, other in (eqn.invars[1:], eqn.invars[:0:-1]):
        found = maker.get(scaled) if isinstance(scaled, Var) else None
        if found is not None and _is_scale(found) and _is_zero(other, maker):
            return found
    return None


def _is_scale(eqn: JaxprEqn) -> bool:
    """Whether `eqn` multiplies or divides by a positive number, which leaves zeros as they are."""
    if eqn.primitive.name not in ("div", "mul") or not isinstance(eqn.invars[1], Literal):
        return False
    value = np.asarray(eqn.invars[1].val)
    return value.ndim == 0 and bool(0 < value.astype(np.float64) < np.inf)


def _is_zero(a: Atom, maker: Mapping[Var, JaxprEqn]) -> bool:
    """Whether `a` is positive zeros."""
    while isinstance(a, Var) and a in maker and maker[a].primitive.name in _FILLS:
        a = maker[a].invars[0]
    if not isinstance(a, Literal):
        return False
    value = np.asarray(a.val).astype(np.float64)
    return value.ndim == 0 and value == 0 and not np.signbit(value)


def _behind(select: JaxprEqn, scale: JaxprEqn) -> list[JaxprEqn]:
    """`select` of what `scale` reads, and the scale behind it."""
    value, by = scale.invars
    [out] = scale.outvars
    chosen = [value if a is out else a for a in select.invars]
    selected = compat.new_var(select.outvars[0].aval)
    first = select.replace(invars=chosen, outvars=[selected])
    then = scale.replace(invars=[selected, by], outvars=select.outvars)
    return [first, then]
