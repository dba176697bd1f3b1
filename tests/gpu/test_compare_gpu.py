"""What JAX's profiler shows of a step on a GPU, beside what the arena timed. `pytest -m gpu`."""

import dataclasses

import jax
import pytest
from test_jit import batch, params, step

import vmem_jax
from vmem_jax.core.costs import MACHINES
from vmem_jax.profile.observe import observe
from vmem_jax.report.compare import compare

pytestmark = pytest.mark.gpu

FAST = dataclasses.replace(MACHINES["h200"], link_out=1e12, link_in=1e12, link_both=2e12)


def test_kernels_and_copies_are_on_one_clock():
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    budgeted = vmem_jax.jit(step, budget=0.5, allow=("order", "offload"), machine=FAST)
    arguments = jax.device_put((params(), batch()), device)
    compiled = budgeted.lower(*arguments).compile()
    assert compiled.plan.transfers
    seen = observe(lambda: budgeted(*arguments), device, compiled.arena)
    assert all(one.kernels for one in seen.runs), seen.notes
    assert any("saw the same" in note for note in seen.notes), seen.notes
    explanation = budgeted.explain(*arguments)
    found = compare(explanation.program, explanation.timeline, explanation.costs, seen.runs)
    assert len(found.rows) == 2 * len(compiled.plan.transfers)
    for one in seen.runs:  # what is fetched last is read by a later kernel
        assert max(c.end for c in one.copies.values()) <= one.kernels[-1].end + 1e-4
