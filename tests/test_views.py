"""Kernels that read a value in two shapes and could write over it: what is found, and results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vmem_jax
from vmem_jax.compiler.views import may_write_over_views


def kernel(operands: str, result: str = "f32[2,6,2]{2,1,0}", view: str = "bitcast(%one)") -> str:
    return f"""
ENTRY %main (x: f32[12,2]) -> f32[2,6,2] {{
  %x.1 = f32[12,2]{{1,0}} parameter(0)
  %tanh = f32[2,6,2]{{2,1,0}} fusion(%x.1), kind=kLoop, calls=%a
  %sum = f32[] fusion(%x.1), kind=kLoop, calls=%b
  %pair = (f32[2,6,2]{{2,1,0}}, f32[]) tuple(%tanh, %sum)
  %fence = (f32[2,6,2]{{2,1,0}}, f32[]) opt-barrier(%pair)
  %one = f32[2,6,2]{{2,1,0}} get-tuple-element(%fence), index=0, metadata={{op_name="a(b)"}}
  %two = f32[] get-tuple-element(%fence), index=1
  %view = f32[2,2,3,2]{{3,2,1,0}} {view}
  ROOT %last = {result} fusion({operands}), kind=kLoop, calls=%c, metadata={{op_name="f(x)"}}
}}
"""


@pytest.mark.parametrize(
    "text, found",
    [
        (kernel("%one, %two, %view"), True),
        (kernel("%view, %one"), True),
        (kernel("%tanh, %view"), True),
        (kernel("%one, %view", "(f32[], f32[2,6,2]{2,1,0})"), True),
        (kernel("%one, %two"), False),
        (kernel("%one, %one"), False),
        (kernel("%two, %view"), False),
        # nothing of either shape is written
        (kernel("%one, %view", "f32[6]{0}"), False),
        # another value
        (kernel("%one, %view", view="reshape(%one)"), False),
    ],
)
def test_kernels_that_read_a_value_in_two_shapes(text, found):
    assert may_write_over_views(text) == found


def test_results_of_a_pool_behind_a_product_in_16_bits():
    """Of its plan XLA (0.11.2, 0.12) lets one kernel write the gradient over the pool's input, of
    which it still reads the largest elements of windows."""

    def step(w, x):
        def loss(w, x):
            half = lambda a: a.astype(jnp.bfloat16)
            y = jnp.matmul(half(x), half(w), preferred_element_type=jnp.float32)
            y = jnp.tanh(y).reshape(2, 2, 3, 2)
            y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            return ((jnp.tanh(y) - 1) ** 2).mean() * 4

        return jax.value_and_grad(loss, (0, 1))(w, x)

    args = (
        jax.random.normal(jax.random.key(1), (2, 2)),
        jax.random.normal(jax.random.key(0), (2, 6, 2)),
    )
    got = vmem_jax.jit(step, budget="1MiB", policy="recompute")(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)
