"""rounded_operands: what products read rounded is rounded where it is made.

`jax.nn.dot_product_attention` asks for products that round their operands to bfloat16 (the
algorithm BF16_BF16_F32), since the gradient of its scores is in float32. XLA:GPU rounds where the
value is made. With our barriers between two such products the value in float32 is there, too, twice
as large, and the second product rounds it in a kernel of its own. A U-Net of latent diffusion needs
144 MiB more so, and is predicted to take 2 % longer (H200).
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from vmem_jax.capture.editor import spliced, with_each_replaced
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var

_ROUNDED = {
    lax.DotAlgorithmPreset.BF16_BF16_BF16: jnp.bfloat16,
    lax.DotAlgorithmPreset.BF16_BF16_F32: jnp.bfloat16,
    lax.DotAlgorithmPreset.F16_F16_F16: jnp.float16,
    lax.DotAlgorithmPreset.F16_F16_F32: jnp.float16,
}
"""What the operands of a product are rounded to, by its algorithm."""


def with_operands_rounded(flat: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """`flat`, whose products read what they round in 16 bits, in the bodies of its loops, too.

    Args:
      platform: that it is compiled for; only on "gpu" something changes. XLA:CPU does not round.
    """
    if platform != "gpu":
        return flat
    return with_each_replaced(flat, lambda _: functools.partial(_rounded, {}))


def _rounded(made: dict[tuple[Var, Any], Var], eqn: JaxprEqn) -> list[JaxprEqn]:
    """`eqn` with its operands rounded, behind what rounds those that are not in `made`."""
    dtype = _read_as(eqn)
    if dtype is None:
        return [eqn]
    before: list[JaxprEqn] = []
    for wide in (a for a in eqn.invars if isinstance(a, Var)):
        if _dtype(wide) == jnp.float32 and (wide, dtype) not in made:
            rounds = functools.partial(lax.convert_element_type, new_dtype=dtype)
            rounding, made[wide, dtype] = spliced(rounds, [wide], eqn)
            before += rounding
    narrow = [made.get((a, dtype), a) if isinstance(a, Var) else a for a in eqn.invars]
    [result] = eqn.outvars
    params = {**eqn.params, "preferred_element_type": _dtype(result)}
    return [*before, eqn.replace(invars=narrow, params=params)]


def _read_as(eqn: JaxprEqn) -> Any:
    """The type that `eqn` rounds its operands to; None where it does not."""
    return _ROUNDED.get(eqn.params["precision"]) if eqn.primitive.name == "dot_general" else None


def _dtype(v: Var) -> Any:
    aval: Any = v.aval
    return aval.dtype
