"""Masks that wait eight in a byte, on a GPU: the values of plain."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import test_packed_masks as masks
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax.capture.packed_masks import with_packed_masks
from vmem_jax.capture.shards import Shards

pytestmark = pytest.mark.gpu

SHAPE = 64, 512, 512


def assert_as_plain(results, step, args):
    """Their loss sums more than 2^24 whole numbers, of which float32 does not have each."""
    (bias, loss), (plain_bias, plain_loss) = results, jax.jit(step)(*args)
    masks.assert_equal(bias, plain_bias)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)


@pytest.mark.parametrize("drop", [masks.leaky, masks.dropped, masks.both])
def test_packed_masks_have_the_values_of_bytes(drop):
    step, args = masks.step_of(drop), masks.arguments(*SHAPE)
    flat = masks.captured_of(step, args).separate
    packed = with_packed_masks(flat, Shards(), 1)
    assert masks.packs(packed)
    assert_as_plain(jax.jit(jaxpr_as_fun(packed))(*jax.tree.leaves(args)), step, args)


def test_a_plan_in_bits_has_the_values_of_plain():
    """In less than it needs with masks in bytes, whether they are kept or made again in time."""
    step, args = masks.step_of(masks.dropped, True), masks.arguments(*SHAPE)
    packed = vmem_jax.jit(step, budget=0.65, allow=("order", "recompute", "bits"))
    assert_as_plain(packed(*args), step, args)
    assert packed.plan(*args).bits
