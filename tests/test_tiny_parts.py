"""Parts that take less time than it takes to start a kernel are in no plan."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import vmem_jax
from vmem_jax.conv import candidates
from vmem_jax.core.cards import CARDS
from vmem_jax.core.machine import LEAST_BUSY

ROWS, WIDTH, LAYERS = 256, 64, 6
MACHINE = CARDS["h200"].machine

weights = [jnp.eye(WIDTH) * 0.5] * LAYERS
rows = jnp.ones((ROWS, WIDTH))


def step(params, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.sin(y @ w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def launching(seconds):
    return dataclasses.replace(MACHINE, launch=seconds)


def test_a_part_takes_at_least_as_long_as_a_launch():
    assert launching(0.1).most_parts(LEAST_BUSY * 0.4) == pytest.approx(4)
    assert launching(0.1).most_parts(0.01) == 1
    assert launching(0.0).most_parts(0.01) == float("inf")


def planned(launch, **options):
    budgeted = vmem_jax.jit(step, budget=0.6, machine=launching(launch), **options)
    return budgeted.lower(weights, rows).compile()


def test_the_batch_is_divided_where_its_parts_are_busy_longer_than_a_launch():
    allowed = {"allow": ("order", "sub_batches")}
    assert planned(1e-12, **allowed).plan.sub_batches > 1
    with pytest.raises(vmem_jax.BudgetError) as error:
        planned(1e-3, **allowed)
    assert error.value.lowest_plan.sub_batches == 1
    assert "takes less time than it takes to start one kernel" in " ".join(str(error.value).split())


def test_a_number_that_is_asked_for_is_taken_all_the_same():
    assert planned(1e-3, sub_batches=4).plan.sub_batches == 4


@pytest.mark.parametrize("launch, divided", [(1e-15, True), (1.0, False)])
def test_convolutions_too(monkeypatch, launch, divided):
    monkeypatch.setattr(candidates, "machine_for", lambda kind: launching(launch))
    shapes = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), window_strides=(1, 1), padding="SAME")

    def step(w, x):
        loss = lambda w: jnp.mean(lax.conv_general_dilated(x, w, **shapes) ** 2)
        return w - jax.grad(loss)(w)

    w, x = jnp.ones((3, 3, 4, 8)), jnp.ones((32, 8, 8, 4))
    budgeted = vmem_jax.jit(step, budget="1GiB", allow=("order", "workspace"))
    program = budgeted._entry_for((w, x), {}, None).best.variant
    choices = program.costs.convolutions
    assert choices
    parts = {len(one.micros) for each in choices.values() for one in each}
    assert (parts != {1}) == divided
