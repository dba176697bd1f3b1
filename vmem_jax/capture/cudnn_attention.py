"""cudnn_attention: what cuDNN's attention computes, and how fast.

Its kernels keep the scores on the chip (Dao et al., "FlashAttention", arXiv:2205.14135) and leave out
the blocks that a causal mask or a window leaves empty. What they reach of the rate of products grows
with the sequence and with the size of a head:

    share = 1.30 d / (d + 66)                      d the size of a head, at most 128
    n0    = 180 keys, 1.9 times in the gradient, 2.9 times with a causal mask
    rate  = share n / (n + n0) of products', 0.88 of that in the gradient

These are fitted to 24 times on an H200 (`benchmarks/rates.py --kinds=attention`: bfloat16, heads of
64 and of 128, 512 to 32,768 tokens), which they meet within 10 %, and to a decoder's whole steps.
"""

from __future__ import annotations

import math

from vmem_jax.jax_compat import JaxprEqn

FORWARD = "dot_product_attention_fwd_wrapper"
BACKWARD = "dot_product_attention_bwd_wrapper"
_PRODUCTS = {FORWARD: 2, BACKWARD: 5}
"""Products of the size of queries times keys; the gradient makes the scores again."""


def flops(eqn: JaxprEqn) -> int:
    """Operations of cuDNN's attention or its gradient, without those that a mask leaves out."""
    query, keys, window = eqn.invars[0].aval.shape, _keys(eqn), eqn.params["sliding_window_length"]
    if window and window < keys:
        read = 2 * window  # with a multiplication and an addition for each key
    else:  # with a causal mask the last query reads all, the first one
        read = keys + 1 if _is_causal(eqn) else 2 * keys
    return _PRODUCTS[eqn.primitive.name] * math.prod(query) * read


def efficiency(eqn: JaxprEqn) -> float:
    """The share of the rate of products that it reaches; 1 for any other equation."""
    if eqn.primitive.name not in _PRODUCTS:
        return 1.0
    gradient = eqn.primitive.name == BACKWARD
    keys, size = _keys(eqn), min(eqn.invars[0].aval.shape[-1], 128)
    half = 180.0 * (1.9 if gradient else 1.0) * (2.9 if _is_causal(eqn) else 1.0)
    share = 1.30 * size / (size + 66) * (0.88 if gradient else 1.0)
    return share * keys / (keys + half)


def _keys(eqn: JaxprEqn) -> int:
    return eqn.invars[1].aval.shape[2 if eqn.params.get("layout") else 1]


def _is_causal(eqn: JaxprEqn) -> bool:
    mask = eqn.params["mask_type"]
    return "CAUSAL" in getattr(mask, "name", str(mask)).upper()
