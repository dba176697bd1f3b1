"""Gradients to tables of few rows: the same values by products, and no atomics on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.batch import Batch, follow_batch
from vmem_jax.capture.editor import spliced, with_each_replaced
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.layouts import Layout
from vmem_jax.capture.small_tables import with_known_tables
from vmem_jax.capture.transposed_convolutions import as_spreading
from vmem_jax.core.cards import machine_for
from vmem_jax.core.costs import analytic
from vmem_jax.core.plan import keep_plan
from vmem_jax.rewrite.rewrite import rewrite

TYPES = (16, 512), (2, 128), "bfloat16"
"""The shape of indices, of a table, and its type."""


def drawn(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rows(seed, shape, low, high, dtype="int32"):
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), dtype)


def gradient(read):
    """Of what reads a table, with a gradient to what it reads."""
    return lambda table, indices, up: jax.vjp(lambda t: read(t, indices), table)[1](up)[0]


def flat_of(fun, *given):
    return flatten(jax.jit(fun).trace(*given).jaxpr)


def scatters(closed):
    found = 0
    for eqn in compat.open_jaxpr(closed).eqns:
        found += eqn.primitive.name.startswith("scatter")
        found += scatters(eqn.params["jaxpr"]) if eqn.primitive.name == "scan" else 0
    return found


def by_layer(table, indices):
    """What a loop over two layers reads."""
    return lax.scan(lambda x, i: (x, x[i]), table, jnp.stack([indices, indices + 1]))[1]


def on_a_cpu(closed):
    """`closed` with products in float32: XLA:CPU has not all of those in 16 bits."""

    def widened(eqn):
        if eqn.primitive.name != "dot_general":
            return [eqn]
        wide = lambda *args: eqn.primitive.bind(*(a.astype("float32") for a in args), **eqn.params)
        return spliced(wide, eqn.invars, eqn, eqn.outvars[0])[0]

    return jaxpr_as_fun(with_each_replaced(closed, lambda _: widened))


at = lambda table, indices: table[indices]
CASES = {
    "types": (at, *TYPES, {}),
    "three of rows": (at, (4, 8, 512), (3, 64), "float16", {}),
    "in float32": (at, (32, 512), (4, 64), "float32", {}),
    "positions": (lambda t, i: t[i].transpose(2, 0, 1), (512, 512), (32, 12), "float32", {}),
    "one dimension": (at, (16384,), (5, 64), "bfloat16", {}),
    "a small batch": (at, (2, 256), (2, 128), "bfloat16", {}),
    "heads": (at, (16, 512), (6, 4, 32), "bfloat16", {}),
    "clipped": (lambda t, i: jnp.take(t, i, 0, mode="clip"), *TYPES, {"low": -3, "high": 5}),
    "filled": (lambda t, i: jnp.take(t, i, 0, fill_value=0), *TYPES, {"low": -5, "high": 9}),
    "from the end": (at, *TYPES, {"low": -2, "high": 0}),
    "bytes": (at, (64, 512), (512, 128), "bfloat16", {"dtype": "uint8", "high": 256}),
    "in a loop": (by_layer, (8, 512), (4, 256), "bfloat16", {"high": 3}),
}
"""What reads a table, the shapes of indices and table, its type, and how indices are drawn."""


def given_of(read, places, table, dtype, options):
    drawing = {"low": 0, "high": table[0], **options}
    indices = rows(1, places, **drawing)
    table = drawn(0, table, dtype)
    return table, indices, drawn(2, jax.eval_shape(read, table, indices).shape, dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_product_makes_the_same_gradient(name):
    read, *_, dtype, _ = CASES[name]
    table, indices, up = given_of(*CASES[name])
    flat = flat_of(gradient(read), table, indices, up)
    known, found = with_known_tables(flat, "gpu", ())
    assert scatters(flat) > scatters(known) == 0 and min(found.values()) > 0
    wide = [a.astype(jnp.float32) for a in (table, up)]
    exact = gradient(read)(wide[0], indices, wide[1])
    [made] = on_a_cpu(known)(table, indices, up)
    assert made.dtype == jnp.dtype(dtype) and made.shape == table.shape
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(made, exact, rtol=tolerance, atol=tolerance * np.abs(exact).max())


def into_ones(table, indices, up):
    return jnp.ones_like(table).at[indices].add(up)


def into_zeros(table, indices, up):
    return jnp.zeros_like(table).at[indices].add(up)


def without_twins(table, indices, up):
    return jnp.zeros_like(table).at[indices].add(up, unique_indices=True)


def along_columns(table, indices, up):
    return jnp.zeros_like(table).at[:, indices].add(up)


STAY = {
    "many rows": (gradient(at), (16, 512), (1024, 128), "bfloat16"),
    "many rows in float32": (gradient(at), (32, 512), (64, 128), "float32"),
    "few updates": (gradient(at), (2, 64), (2, 128), "bfloat16"),
    "few updates in float32": (gradient(at), (4, 512), (2, 128), "float32"),
    "few of each row": (gradient(at), (16, 512), (300, 128), "bfloat16"),
    "few columns": (gradient(at), (1024, 512), (16, 2), "bfloat16"),
    "one dimension in float32": (gradient(at), (16384,), (2, 64), "float32"),
    "whole numbers": (into_zeros, *TYPES[:2], "int32"),
    "not zero before": (into_ones, *TYPES),
    "no index twice": (without_twins, *TYPES),
    "columns": (along_columns, (16, 512), (128, 2), "bfloat16"),
}
"""What stays a scatter, with the shapes of its indices and table, and the type."""


@pytest.mark.parametrize("name", STAY)
def test_others_stay(name):
    fun, places, shape, dtype = STAY[name]
    table = jax.ShapeDtypeStruct(shape, dtype)
    along = (shape[0], *places) if fun is along_columns else (*places, shape[1])
    indices = jax.ShapeDtypeStruct(places, jnp.int32)
    flat = flat_of(fun, table, indices, jax.ShapeDtypeStruct(along, dtype))
    known, found = with_known_tables(flat, "gpu", ())
    assert scatters(flat) == scatters(known) == 1 and not found


def test_all_stay_on_a_cpu_and_on_several_devices():
    flat = flat_of(gradient(at), *given_of(*CASES["types"]))
    assert with_known_tables(flat, "cpu", ()) == (flat, {})
    split = jax.NamedSharding(jax.sharding.AbstractMesh((2,), ("data",)), jax.P("data"))
    assert with_known_tables(flat, "gpu", [None, split, split]) == (flat, {})


def step(params, indices, x):
    """Of a network that adds a type's row to each token."""

    def loss(params):
        table, w = params
        y = x + table.astype(jnp.bfloat16)[indices]
        return jnp.square(jnp.tanh(y @ w.astype(jnp.bfloat16))).astype(jnp.float32).mean()

    return [p - 0.1 * d for p, d in zip(params, jax.grad(loss)(params), strict=True)]


def arguments():
    params = [drawn(0, (2, 128), "float32"), drawn(1, (128, 64), "float32")]
    return params, rows(2, (16, 512), 0, 2), drawn(3, (16, 512, 128), "bfloat16")


def test_the_step_can_be_divided():
    given = arguments()
    captured = capture(jax.jit(step).trace(*given).jaxpr, platform="gpu")
    assert scatters(captured.flat) == 0
    batch = follow_batch(captured.flat, [None, None, Layout(0), Layout(0)], 16)
    assert isinstance(batch, Batch), batch
    split = captured.in_sub_batches(batch, 2)
    rewritten = rewrite(split, keep_plan(split.program, None, 0, 0.0))
    made = on_a_cpu(rewritten)(*jax.tree.leaves(given))
    for a, b in zip(step(*given), made, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_plain_jit_takes_longer():
    captured = capture(jax.jit(step).trace(*arguments()).jaxpr, platform="gpu")
    costs = analytic(captured.program, machine_for("h200"))
    written = captured.written.spreading
    plain = as_spreading(costs, captured.program, captured.flat.jaxpr.eqns, written)
    times = {round(b / a) for a, b in zip(costs.seconds, plain.seconds, strict=True) if a}
    assert times == {1, 4096 // 4}  # updates of a row


@pytest.mark.gpu_compile
@pytest.mark.parametrize("sub_batches", [1, 2])
def test_no_atomics_are_compiled(sub_batches):
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    given = jax.tree.map(shape, arguments())
    options = {"policy": "exact", "donate_argnums": 0, "sub_batches": sub_batches}
    compiled = vmem_jax.jit(step, budget="1GiB", **options).lower(*given).compile(target="h200")
    assert " scatter(" not in compiled.as_text() and "dot(" in compiled.as_text()
