"""wide_sums: products in 16 bits that are added to totals in float32 are made in float32.

Weights in float32 that are cast for a product get the gradient that this makes in 16 bits, cast. In
sub-batches such gradients are added up. cuBLAS adds what it makes to a total as it writes, but only
in the type of the total. So the product is asked for float32, which is what it adds up in anyway: no
kernel reads the gradient and the total again, and it is rounded once, as it is without sub-batches.
Of 2,048 × 5,632 weights and 4,096 tokens product and sum take 189 µs of an H200, not 211 (bfloat16,
JAX 0.11.2, `benchmarks/totals.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.def_use import makers, readers
from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import Atom, JaxprEqn, Var

_WIDE = jnp.dtype("float32")

_ALGORITHMS = (lax.DotAlgorithm, lax.DotAlgorithmPreset)
"""Which say what type a product is added up in."""


def with_wide_sums(
    eqns: Sequence[JaxprEqn], totals: Collection[Var], results: Sequence[Atom]
) -> list[JaxprEqn]:
    """`eqns` with each product made in float32 that only one sum with one of `totals` reads.

    Args:
      results: what is read of `eqns` elsewhere.
    """
    made, read = makers(eqns), readers(eqns)
    elsewhere = {a for a in results if isinstance(a, Var)}
    found: list[JaxprEqn | None] = [*eqns]
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name not in ("add", "add_any") or _dtype(eqn.outvars[0]) != _WIDE:
            continue
        parts = [a for a in eqn.invars if not (isinstance(a, Var) and a in totals)]
        if len(parts) != 1:
            continue
        [part] = parts
        path: list[int] = []
        while isinstance(part, Var) and part not in elsewhere and len(read[part]) == 1:
            if part not in made or part in totals:
                break
            path.append(made[part])
            last = eqns[path[-1]]
            if class_of(last) is not Class.VIEW and not _widens(last):
                break
            [part, *_] = last.invars
        if path and _is_narrow_product(eqns[path[-1]]):
            _widen(found, path[::-1], i)
    return [eqn for eqn in found if eqn is not None]


def _widen(found: list[JaxprEqn | None], path: Sequence[int], add: int) -> None:
    """Has what the equations of `path` make, from a product to what `add` reads, be in float32."""
    env: dict[Var, Var] = {}
    read = lambda eqn: [env.get(a, a) if isinstance(a, Var) else a for a in eqn.invars]
    for i in path:
        eqn = found[i]
        assert eqn is not None, "an equation leads to one sum"
        [out] = eqn.outvars
        if _widens(eqn):
            found[i], [env[out], *_] = None, read(eqn)
            continue
        wide: Any = out.aval
        env[out] = compat.new_var(wide.update(dtype=_WIDE))
        params = dict(eqn.params)
        if eqn.primitive.name == "dot_general":
            params["preferred_element_type"] = _WIDE
        found[i] = eqn.replace(invars=read(eqn), outvars=[env[out]], params=params)
    eqn = found[add]
    assert eqn is not None, "a sum is no part of a path"
    found[add] = eqn.replace(invars=read(eqn))


def _is_narrow_product(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general" or isinstance(eqn.params["precision"], _ALGORITHMS):
        return False
    out = _dtype(eqn.outvars[0])
    return out in ("bfloat16", "float16") and all(_dtype(a) == out for a in eqn.invars)


def _widens(eqn: JaxprEqn) -> bool:
    """Whether `eqn` casts to float32."""
    return eqn.primitive.name == "convert_element_type" and _dtype(eqn.outvars[0]) == _WIDE


def _dtype(a: Atom) -> Any:
    aval: Any = a.aval
    return aval.dtype
