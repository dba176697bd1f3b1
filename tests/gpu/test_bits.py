"""Masks that wait eight in a byte, on a GPU: the values of plain."""

from __future__ import annotations

import jax
import pytest
import test_packed_masks as masks

import vmem_jax

pytestmark = pytest.mark.gpu

SHAPE = 64, 512, 512


@pytest.mark.parametrize(("drop", "scanned"), [(masks.leaky, False), (masks.dropped, True)])
def test_a_step_has_the_values_of_plain_where_bits_are_faster(drop, scanned):
    """Than to make the masks again, in somewhat more than a step needs without masks."""
    step, args, allow = (
        masks.step_of(drop, scanned),
        masks.arguments(*SHAPE),
        ("order", "recompute"),
    )
    budget = int(1.1 * vmem_jax.lowest(step, *args, allow=allow).nbytes)
    packed = vmem_jax.jit(step, budget=budget, allow=(*allow, "bits"))
    masks.assert_equal(packed(*args), jax.jit(step)(*args))
    assert packed.plan(*args).bits
