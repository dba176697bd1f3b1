"""overwriting: barriers in front of updates, on a program drawn by hand."""

from __future__ import annotations

import pytest
from helpers import BACKWARD, UPDATE, Builder

from vmem_jax.core.fences import Fence, fences
from vmem_jax.core.overwriting import readers_before_updates
from vmem_jax.core.program import Program
from vmem_jax.core.spines import uses_of


def cast_weight() -> tuple[Program, int, int]:
    """A step that reads a cast of its weight in both passes; its weight, and the cast.

    Steps: 0 cast, 1 product, 2 loss, 3 gradient of the weight, 4 cotangent by the cast, 5 update.
    """
    b = Builder()
    weight, x = b.input(64), b.input(8)
    cast = b.step([weight], 32, fusible=True)
    out = b.step([x, cast], 8)
    loss = b.step([out], 8)
    gradient = b.step([x, loss], 64, BACKWARD)
    cotangent = b.step([loss, cast], 8, BACKWARD)
    new = b.step([weight, gradient], 64, UPDATE, fusible=True)
    return b.program([new, cotangent], [(weight, new)]), weight, cast


@pytest.mark.parametrize(
    ("order", "held"),
    [
        ((0, 1, 2, 3, 4, 5), ()),  # the cast of the forward pass: the gradient depends on it
        ((0, 1, 2, 3, 0, 5, 4), ((5, (0, 2)),)),  # made again, it could run behind the update
        ((0, 1, 2, 3, 0, 4, 5), ()),  # what it led to is an output, which no barrier holds
    ],
)
def test_an_update_waits_for_a_cast_that_is_made_again(order, held):
    program, weight, cast = cast_weight()
    assert (weight, cast) == (0, 2)
    assert tuple(readers_before_updates(program, order, uses_of(program, order), {}, 0)) == held


def test_what_a_barrier_ties_already_needs_no_other():
    program, weight, cast = cast_weight()
    order = (0, 1, 2, 3, 0, 5, 4)
    there = {5: (weight, cast)}
    assert not tuple(readers_before_updates(program, order, uses_of(program, order), there, 0))
    assert not tuple(readers_before_updates(program, order, uses_of(program, order), {}, 64)), (
        "small enough to be copied"
    )


def test_fences_has_them_beside_its_own():
    program, weight, cast = cast_weight()
    found = fences(program, (0, 1, 2, 3, 0, 5, 4), small=0)
    (before,) = (fence for fence in found if fence.position == 5)
    assert {weight, cast} <= {*before.buffers}
    assert len({fence.position for fence in found}) == len(found)
    assert all(isinstance(fence, Fence) for fence in found)
