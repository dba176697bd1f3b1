"""What an error advises: the largest predicted effect first, on one screen, and true."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from processes import in_subprocess

import vmem_jax
from vmem_jax import BudgetError
from vmem_jax.api.failure import MOST_HELPS, Help, advice

WEIGHTS = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 6
BATCH = jax.ShapeDtypeStruct((2048, 32), jnp.float32)


def train_step(weights, x):
    def loss(weights):
        h = x
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def error_of(budget, **options):
    with pytest.raises(BudgetError) as caught:
        vmem_jax.jit(train_step, budget=budget, **options).plan(WEIGHTS, BATCH)
    return caught.value


def helps_of(error):
    lines = str(error).partition("What would help:\n")[2].splitlines()
    assert [line[:5] for line in lines] == [f"  {i}. " for i in range(1, len(lines) + 1)]
    assert 1 <= len(lines) <= MOST_HELPS
    return [line[5:] for line in lines]


def test_a_technique_that_is_left_out_comes_first_where_it_is_enough():
    error = error_of("700KiB", allow=("order",))
    first, second, third = helps_of(error)
    assert re.match(r"Let `allow` name .*\"recompute\".* as well: predicted to be enough\.", first)
    assert f"larger `budget`: {error.lowest_peak}" in second and "is met" in second
    assert third.startswith("Donate the state") and "`weights`: about 24.00 KiB less" in third
    vmem_jax.jit(train_step, budget="700KiB").plan(WEIGHTS, BATCH)  # it is enough
    assert len(str(error).splitlines()) <= 12


def test_what_no_step_on_several_devices_can_use_is_advised_only_where_it_was_asked_for():
    out = in_subprocess(
        """
        import jax
        from jax.sharding import NamedSharding, PartitionSpec as P
        from test_helps import BATCH, WEIGHTS, train_step
        import vmem_jax
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        put = lambda a, *spec: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, P(*spec)))
        args = jax.tree.map(put, WEIGHTS), put(BATCH, "data")
        for options in ({}, {"allow": ("order", "sub_batches")}):
            try:
                vmem_jax.jit(train_step, budget="100KiB", **options).plan(*args)
            except vmem_jax.BudgetError as error:
                lines = str(error).splitlines()
                print([line[5:] for line in lines if '"sub_batches" is not used' in line])
        """,
        4,
    )
    default, named = out.splitlines()
    assert default == "[]"
    assert "it runs on several devices" in named and "enough" not in named


def test_donation_is_advised_once():
    given = error_of("700KiB", allow=("order",), donate_argnums=0)
    assert not any("Donate" in line for line in helps_of(given))


def test_other_policies_and_whole_batches_are_named():
    assert helps_of(error_of("700KiB", policy="recompute"))[0].startswith("Take policy `auto`")
    whole = helps_of(error_of("700KiB", sub_batches=1))[0]
    assert whole == "Leave out `sub_batches=1`: predicted to be enough."


def test_the_three_largest_holders_have_their_lines():
    text = str(error_of("700KiB", allow=("order",)))
    holders = re.findall(
        r"^ +256\.00 KiB  layer\d .*, made at layer\d: .* at test_helps\.py:\d+$", text, re.M
    )
    assert len(holders) == 3


def test_the_order_of_advice():
    helps = [
        Help("small", 10),
        Help("unknown"),
        Help("none", 0),
        Help("large", 100),
        Help("some", 60),
    ]
    lines = [line[5:] for line in advice(50, 100, 20, helps).splitlines()]
    assert lines[:2] == ["large: predicted to be enough.", "some: predicted to be enough."]
    assert "100 (100 B) is met; or take a smaller batch, about 38% of this one" in lines[2]
    named = advice(50, 100, 20, [*helps[:1], Help("named", asked=True)]).splitlines()
    assert [line[5:] for line in named[1:]] == ["named.", "small: about 10 B less."]
    few = advice(50, 100, 60, [Help("unknown"), Help("small", 10)]).splitlines()
    assert "smaller model" in few[0]
    assert [line[5:] for line in few[1:]] == ["small: about 10 B less.", "unknown."]
