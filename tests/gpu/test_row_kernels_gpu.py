"""Kernels of rows on a GPU, beside what XLA makes of their equations."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import test_row_kernels as rows

import vmem_jax

pytestmark = pytest.mark.gpu

SIZES = {"padded": 197, "longer": 577, "aligned": 264}


@pytest.mark.parametrize("tokens", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", rows.CASES)
def test_values_are_those_of_passes(name, tokens, monkeypatch):
    monkeypatch.setattr(rows, "T", tokens)
    args = rows.arguments(tokens=tokens, samples=8, width=64, size=64)
    _, found = rows.replaced(rows.captured(rows.CASES[name][0], args).flat)
    assert len(found) == 2
    for reduced in found:
        tiling = reduced.tiling
        rows.assert_tiles_have_the_values_of_passes(reduced, tiling, rtol=2e-2, interpret=False)


def test_a_step_has_the_values_of_plain():
    args = rows.arguments(tokens=197, samples=32, width=64, size=64)
    step = rows.step_of(rows.dropped)
    ours = vmem_jax.jit(step, budget=0.95)
    (found, value), (expected, plain) = ours(*args), jax.jit(step)(*args)
    assert ours.plan(*args).row_kernels == 2
    np.testing.assert_allclose(value, plain, rtol=1e-3)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.sqrt(np.square(a - b).mean()) <= 1e-2 * np.sqrt(np.square(b).mean())
