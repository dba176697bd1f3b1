"""Calls of traced functions, as equations of a jaxpr."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls

LIKE = compat.open_jaxpr(jax.make_jaxpr(jnp.sin)(1.0)).eqns[0]


def emitted(key, *shapes):
    """The traces that two calls on operands of each of `shapes` take, and their equations."""
    traces, eqns = [], []

    def call(x):
        traces.append(x.shape)
        return jnp.sin(x)

    calls = Calls(eqns.append)
    for shape in shapes:
        x = compat.new_var(jax.typeof(jnp.ones(shape)))
        for _ in range(2):
            calls.bind(lambda x: call(x), [x], LIKE, key)  # JAX has not seen this one
    return traces, eqns


def test_a_call_with_a_key_is_traced_once_for_operands_of_one_type():
    traces, eqns = emitted("sin", (2,), (3,))
    assert traces == [(2,), (3,)]
    assert [eqn.primitive.name for eqn in eqns] == ["sin"] * 4
    assert len({v for eqn in eqns for v in eqn.outvars}) == 4


def test_a_call_without_one_is_traced_each_time():
    assert emitted(None, (2,))[0] == [(2,), (2,)]
