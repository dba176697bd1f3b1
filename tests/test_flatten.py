"""flatten: calls inlined, dead equations dropped, repeated ones merged, effects left alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import drop_dead, flatten, inline, merge_repeated

X = jnp.linspace(-1.0, 1.0, 8)


def names(jaxpr):
    return [eqn.primitive.name for eqn in compat.open_jaxpr(jaxpr).eqns]


def flat(fun, *args):
    """The flat jaxpr of `fun`, checked: well-formed, and the same results op by op."""
    closed = jax.make_jaxpr(fun)(*args)
    result = flatten(closed)
    compat.check_jaxpr(result)
    leaves = jax.tree.leaves(args)
    for a, b in zip(jaxpr_as_fun(result)(*leaves), jaxpr_as_fun(closed)(*leaves), strict=True):
        np.testing.assert_array_equal(a, b)
    return result


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), tangents[0] * 2.0))


@jax.custom_vjp
def scaled(x):
    return x * 3.0


scaled.defvjp(lambda x: (x * 3.0, x), lambda x, g: (g * x,))


@pytest.mark.parametrize(
    "fun, expected",
    [
        (jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1), ["sin", "add"]),
        (lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.cos(y)))(x), ["cos", "sin"]),
        (scaled, ["mul"]),
        (lambda x: jax.jit(jax.checkpoint(jax.jit(scaled)))(x), ["mul"]),
    ],
    ids=["jit", "checkpoint", "custom_vjp", "nested"],
)
def test_calls_are_inlined(fun, expected):
    assert names(flat(fun, X)) == expected


def test_custom_derivatives_are_kept():
    got = flat(lambda x: jax.grad(lambda y: clipped(scaled(y)).sum())(x), X)
    assert not {"custom_jvp_call", "custom_vjp_call", "jit", "pjit"} & set(names(got))
    np.testing.assert_allclose(jaxpr_as_fun(got)(X)[0], 2 * X)


def test_checkpoint_is_a_hint_whose_repeated_values_are_merged():
    def layer(x):
        return jnp.sin(jnp.cos(x))

    plain = flat(jax.grad(lambda x: layer(layer(x)).sum()), X)
    hinted = flat(jax.grad(lambda x: jax.checkpoint(layer)(jax.checkpoint(layer)(x)).sum()), X)
    assert "optimization_barrier" not in names(hinted)
    count = lambda jaxpr: [names(jaxpr).count(n) for n in ("sin", "cos")]
    assert count(hinted) == count(plain)


def test_inner_jit_with_shardings_stays_opaque():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    inner = jax.jit(jnp.sin, out_shardings=sharding)
    got = names(flat(lambda x: inner(x) + 1, X))
    assert got[-1] == "add" and "sin" not in got


@pytest.mark.parametrize(
    "fun, name",
    [
        (lambda x: jax.lax.scan(lambda c, v: (c + v, c), 0.0, x)[1], "scan"),
        (
            lambda x: jax.lax.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x)
            ),
            "while",
        ),
        (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), "cond"),
    ],
)
def test_control_flow_stays_opaque(fun, name):
    assert names(flat(fun, X)).count(name) == 1


def test_dead_equations_are_dropped_and_effects_are_not():
    def fun(x):
        jnp.exp(x)
        jax.debug.print("{}", x)
        return x + 1

    closed = inline(jax.make_jaxpr(fun)(X))
    left = names(drop_dead(closed))
    assert "exp" in names(closed) and "exp" not in left
    assert any("callback" in n or "print" in n for n in left)


def test_results_of_scans_that_nothing_reads_are_dropped_with_what_makes_them():
    def once(carry, x):
        a, b = carry
        return (a * x, jnp.cos(b) + x), (jnp.sin(a), jnp.exp(x))

    def fun(x):
        (a, _), (_, y) = jax.lax.scan(once, (x[0], x[1]), x)
        z = jax.lax.scan(lambda c, x: (c, x + 1), 0.0, x)[1]  # that nothing reads of at all
        del z
        return a, y

    [scan] = [e for e in compat.open_jaxpr(flat(fun, X)).eqns if e.primitive.name == "scan"]
    assert [v.aval.shape for v in scan.outvars] == [(), (8,)]
    assert names(scan.params["jaxpr"]) == ["mul", "exp"]


def test_scans_with_effects_keep_their_results():
    def once(carry, x):
        jax.debug.print("{}", x)
        return carry + x, jnp.exp(x)

    closed = jax.make_jaxpr(lambda x: jax.lax.scan(once, 0.0, x)[0])(X)
    [scan] = [e for e in compat.open_jaxpr(flatten(closed)).eqns if e.primitive.name == "scan"]
    assert len(scan.outvars) == 2


def test_repeated_equations_are_merged_but_not_effects_or_different_parameters():
    def fun(x):
        jax.debug.print("same")
        jax.debug.print("same")
        return jnp.sin(x) + jnp.sin(x), x.sum(0), x.reshape(2, 4).sum(0), x.reshape(2, 4).sum(1)

    merged = names(merge_repeated(inline(jax.make_jaxpr(fun)(X))))
    assert merged.count("sin") == 1
    assert merged.count("reshape") == 1
    assert merged.count("reduce_sum") == 3
    assert sum("callback" in n or "print" in n for n in merged) == 2


def test_random_draws_of_different_keys_are_not_merged():
    def fun(key):
        a, b = jax.random.split(key)
        return jax.random.normal(a, (4,)), jax.random.normal(b, (4,)), jax.random.normal(a, (4,))

    first, second, third = jaxpr_as_fun(flat(lambda k: fun(k), jax.random.key(0)))(
        jax.random.key(0)
    )
    assert (first == third).all() and (first != second).any()


def test_signed_zeros_and_dtypes_of_literals_are_told_apart():
    got = flat(lambda x: (x * 0.0, x * -0.0, x + 1, x + 1.5), X)
    assert len(names(got)) == 4


def test_constants_are_kept_once_each_and_only_if_used():
    table, unused = np.arange(8.0, dtype=np.float32), np.ones(8, np.float32)

    def fun(x):
        return jax.jit(lambda y: y + jnp.asarray(table))(x) + jax.jit(
            lambda y: (y * jnp.asarray(table), jnp.asarray(unused))[0]
        )(x)

    flat(fun, X)


def test_nothing_to_flatten():
    assert names(flat(lambda x: x, X)) == []
    assert names(flat(lambda: 1.0)) == []


def test_a_scan_of_one_iteration_is_its_body():
    def step(w, x):
        body = lambda x, w: (jnp.tanh(x @ w), x.sum())
        x, sums = jax.lax.scan(body, x, w, reverse=True)
        return x, sums

    w, x = jnp.ones((1, 4, 4)), jnp.arange(8.0).reshape(2, 4)
    closed = jax.make_jaxpr(jax.jit(step))(w, x)
    flat = flatten(closed)
    names = [eqn.primitive.name for eqn in flat.eqns]
    assert "scan" not in names and "dot_general" in names
    for a, b in zip(jaxpr_as_fun(flat)(w, x), step(w, x), strict=True):
        np.testing.assert_array_equal(a, b)
    longer = jax.make_jaxpr(jax.jit(step))(jnp.ones((2, 4, 4)), x)
    assert "scan" in [eqn.primitive.name for eqn in flatten(longer).eqns]
