"""What JAX's profiler shows of a step on a GPU, beside what the arena timed. `pytest -m gpu`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from test_jit import batch, params, step

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.profile.observe import observe
from vmem_jax.report.compare import compare

pytestmark = pytest.mark.gpu

FAST = dataclasses.replace(CARDS["h200"].machine, link_out=1e12, link_in=1e12, link_both=2e12)


@pytest.fixture
def device():
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")


def test_kernels_and_copies_are_on_one_clock(device):
    uncached = vmem_jax.Auto(allow=("order", "offload"), cache=False)
    budgeted = vmem_jax.jit(
        step, budget=0.5, policy=uncached, allow=("order", "offload"), machine=FAST
    )
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


def test_both_directions_overlap_each_other_and_compute(device):
    """A copy out and one back that begin at once, beside products."""
    seen = crossing(device, size=8192, products=6)
    print(seen.summary())
    real = {(row.transfer, row.direction): row.real for row in seen.rows}
    shorter = min(copy.end - copy.begin for copy in (real[1, "out"], real[0, "into"]))
    # on an H100 the second began 0.4 ms behind the first, of 3.0
    assert seen.real_overlap.both > 0.8 * shorter > 0
    assert seen.real_overlap.hidden > 0.9 * seen.real_overlap.copies


def crossing(device, size, products):
    """What a step does of which one large value comes back while another leaves."""

    def step(x, w):
        early = jnp.tanh(x)
        for _ in range(products):
            x = x @ w
        late = jnp.tanh(x)
        for _ in range(products):
            x = x @ w
        x = x + early
        for _ in range(products):
            x = x @ w
        return x + late

    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    x, w = jax.device_put((x, w / size**0.5), device)
    program = capture(jax.jit(step).trace(x, w).jaxpr).program
    early, late = (s.writes[0] for s in program.steps if s.op == "tanh")
    first, second, end = (n * products + 1 for n in (1, 2, 3))  # `late` is made; then both are read
    transfers = (
        Transfer(early, 1, first - 1, first + 1, second),
        Transfer(late, first + 1, second, second + 1, end),
    )
    order = tuple(range(len(program.steps)))
    plan = Plan(program.fingerprint, "", order, True, None, 0, 0.0, transfers)
    budgeted = vmem_jax.jit(step, budget="device", policy=vmem_jax.Auto(cache=False), plan=plan)
    arena = budgeted.lower(x, w).compile().arena
    seen = observe(lambda: budgeted(x, w), device, arena)
    explanation = budgeted.explain(x, w)
    return compare(explanation.program, explanation.timeline, explanation.costs, seen.runs)
