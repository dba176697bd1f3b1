"""The options that a step is compiled with: the user's beside those that plans depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax.compiling import LONG, left_out, with_ours
from vmem_jax.jax_compat import FENCE_OPTIONS

PASSES = "xla_disable_hlo_passes"
FENCED = FENCE_OPTIONS["cpu"][PASSES]


@pytest.mark.parametrize(
    "given, platform, steps, options",
    [
        ({}, "gpu", 100, {}),
        ({"xla_a": 1}, "gpu", LONG, {"xla_a": 1}),
        ({}, "gpu", LONG + 1, {PASSES: "multi_output_fusion"}),
        ({PASSES: "algsimp"}, "gpu", LONG + 1, {PASSES: "multi_output_fusion,algsimp"}),
        ({PASSES: "algsimp"}, "cpu", LONG + 1, {PASSES: f"{FENCED},algsimp"}),
        ({"xla_a": 1}, "cpu", 100, {PASSES: FENCED, "xla_a": 1}),
    ],
)
def test_passes_are_left_out_that_either_names(given, platform, steps, options):
    assert with_ours(given, platform, steps) == options
    described = {"xla_gpu_autotune_level": "0"} if platform == "gpu" else {}
    assert with_ours(given, platform, steps, described=True) == {**described, **options}
    long = platform == "gpu" and steps > LONG
    assert ("multi_output_fusion" in left_out(platform, steps)) is long


def test_a_plan_fits_beside_the_users_own_options():
    """On a CPU a recomputation survives only without one pass, whatever else the user leaves out."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    step = lambda ws, x: jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))
    shapes = [jax.ShapeDtypeStruct((32, 32), "float32")] * 8, jnp.ones((4096, 32))
    needs = []
    for passes in ({}, {PASSES: "dot_dimension_merger"}):
        budgeted = vmem_jax.jit(step, budget=0.6, compiler_options=passes, donate_argnums=0)
        needs.append(budgeted.lower(*shapes).compile().need_nbytes)
    assert needs[0] == needs[1]
