"""Dropout masks by one kernel on a GPU, beside what XLA draws."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import test_drawn_masks as masks

import vmem_jax

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", masks.MASKS)
def test_masks_are_the_same(case):
    assert len(masks.same(masks.step(case), masks.KEY)) == 1


@pytest.mark.parametrize("plan", masks.PLANS)
def test_a_step_draws_what_plain_does(plan):
    """Also in sub-batches, each of which draws its own part."""
    args = masks.dropping_arguments()
    # without its budget: here products may need other workspaces
    given = dataclasses.replace(masks.described(masks.PLANS[plan]).plan, budget=None)
    ours = vmem_jax.jit(masks.dropping, plan=given)
    (value, found), (plain, expected) = ours(*args), jax.jit(masks.dropping)(*args)
    assert ours.plan(*args) == given and given.bits
    np.testing.assert_allclose(value, plain, rtol=1e-4)
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() <= 1e-2 * np.abs(b).max()
