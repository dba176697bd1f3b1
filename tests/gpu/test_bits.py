"""Masks that wait eight in a byte, on a GPU: the values of plain."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import test_packed_masks as masks

import vmem_jax

pytestmark = pytest.mark.gpu

SHAPE = 64, 512, 512


@pytest.mark.parametrize(
    ("drop", "scanned", "budget"), [(masks.leaky, False, 0.7), (masks.dropped, True, 0.65)]
)
def test_a_step_has_the_values_of_plain(drop, scanned, budget):
    """In less than it needs with masks in bytes, whether they are kept or made again in time. The
    loss sums more than 2^24 whole numbers, of which float32 does not have each."""
    step, args = masks.step_of(drop, scanned), masks.arguments(*SHAPE)
    packed = vmem_jax.jit(step, budget=budget, allow=("order", "recompute", "bits"))
    (bias, loss), (plain_bias, plain_loss) = packed(*args), jax.jit(step)(*args)
    masks.assert_equal(bias, plain_bias)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)
    assert packed.plan(*args).bits
