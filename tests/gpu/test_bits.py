"""Masks that wait eight in a byte, on a GPU: the values of plain."""

from __future__ import annotations

import jax
import pytest
import test_packed_masks as masks

import vmem_jax

pytestmark = pytest.mark.gpu

SHAPE = 64, 512, 512


@pytest.mark.parametrize(
    ("drop", "scanned", "budget"), [(masks.leaky, False, 0.9), (masks.dropped, True, 0.65)]
)
def test_a_step_has_the_values_of_plain(drop, scanned, budget):
    """In less than it needs with masks in bytes, whether they are kept or made again in time."""
    step, args = masks.step_of(drop, scanned), masks.arguments(*SHAPE)
    packed = vmem_jax.jit(step, budget=budget, allow=("order", "recompute", "bits"))
    masks.assert_equal(packed(*args), jax.jit(step)(*args))
    assert packed.plan(*args).bits
