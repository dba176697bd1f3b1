"""Both ways to move bytes, by one table: the same plans, the same bits, the same refusals.

On the CPU the calls have twins with a real arena, and XLA's own copies are none: what they free is
tested where XLA:GPU compiles (tests/transfer/test_gpu_compile.py).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAST
from test_jit import batch, params, step
from threads import in_threads

import vmem_jax
from vmem_jax import BudgetError, HostMemoryError, Plan
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.core.costs import analytic
from vmem_jax.policy import Auto
from vmem_jax.rewrite.rewrite import rewrite
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.transfer import ffi
from vmem_jax.transfer.extension import describe
from vmem_jax.transfer.transport_choice import choose, open_transport

needs_extension = pytest.mark.skipif(
    describe().startswith("none"), reason=f"native extension: {describe()}"
)
BOTH = pytest.mark.parametrize(
    "transport", [pytest.param("ffi", marks=needs_extension), "memory_kinds"]
)


def captured(fun, *args):
    leaves, tree = jax.tree.flatten(args)
    flat = lambda *leaves: jax.tree.leaves(fun(*jax.tree.unflatten(tree, leaves)))
    names = [f"x{i}" for i in range(len(leaves))]
    return capture(jax.jit(flat).trace(*leaves).jaxpr, names, [False] * len(leaves))


def moving(fun, *args, share=0.6):
    """A plan of `fun` that moves, and recomputes nothing; for any machine, without a budget."""
    found = captured(fun, *args)
    costs = analytic(found.program, FAST)
    peak = Auto(allow=("order",)).plan(found.program, costs, None).predicted_peak
    try:
        plan = Auto(allow=("order", "offload")).plan(found.program, costs, int(share * peak))
    except BudgetError as error:
        plan = error.lowest_plan
    assert plan.transfers and not plan.recomputed
    return dataclasses.replace(plan, budget=None)


def masks_and_indices(w, x):
    """Residuals of other dtypes: booleans, integers, bfloat16."""

    def loss(w):
        y = x.astype(jnp.bfloat16)
        for i in range(6):
            y = jnp.where(y > 0, y, 0.1 * y) @ w[i].astype(jnp.bfloat16)
            y = y.at[jnp.argmax(y, 0), jnp.arange(32)].multiply(2.0)
        return jnp.square(y).mean().astype(jnp.float32)

    return w - 0.1 * jax.grad(loss)(w)


STEPS = {
    "chain": (step, lambda: (params(), batch())),
    "masks and indices": (masks_and_indices, lambda: (jnp.stack(params()[:6]), batch())),
}


def same(a, b):
    leaves = jax.tree.leaves(a), jax.tree.leaves(b)
    return all(np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


@BOTH
@pytest.mark.parametrize("name", STEPS)
def test_every_bit_comes_back(name, transport):
    fun, args = STEPS[name]
    budgeted = vmem_jax.jit(fun, plan=moving(fun, *args()), transport=transport)
    compiled = budgeted.lower(*args()).compile()
    assert compiled.transport == transport
    assert (compiled.arena is None) == (transport == "memory_kinds")
    kept = vmem_jax.jit(fun, budget="1GiB", policy="exact")(*args())
    for _ in range(2):
        assert same(budgeted(*args()), kept)


@BOTH
@pytest.mark.parametrize("name", STEPS)
def test_the_rewritten_step_has_the_four_points_of_every_transfer(name, transport):
    """Behind the rewriter the jaxprs are the same but for what the points are."""
    fun, args = STEPS[name]
    plan = moving(fun, *args())
    found = captured(fun, *args())
    mover = open_transport(transport, layout_of(found.program, plan), None)
    jaxpr = rewrite(found, plan, mover)
    compat.check_jaxpr(jaxpr)
    names = collections.Counter(
        eqn.params.get("target_name", str(eqn.params.get("devices")))
        for eqn in compat.open_jaxpr(jaxpr).eqns
        if eqn.primitive.name in ("ffi_call", "device_put")
    )
    points = {
        "ffi": [f"vmem_jax_{c}_{e}" for c in ("offload", "fetch") for e in ("start", "done")],
        "memory_kinds": [f"({s!r},)" for s in (jax.memory.Space.Host, jax.memory.Space.Device)],
    }[transport]
    assert names == {point: len(plan.transfers) for point in points}


@BOTH
def test_host_budget_is_said_before_the_step_runs(transport):
    ran = []

    def noisy(params, x):
        jax.debug.callback(lambda: ran.append(1))
        return step(params, x)

    options = {"plan": moving(noisy, params(), batch()), "transport": transport}
    budgeted = vmem_jax.jit(noisy, host_budget=1024, **options)
    for _ in range(2):  # and again: nothing was kept of the first try
        with pytest.raises(HostMemoryError, match=r"KiB of host.*at most 1\.00 KiB .*host_budget"):
            budgeted(params(), batch())
    jax.effects_barrier()
    assert ran == []
    jax.block_until_ready(vmem_jax.jit(noisy, host_budget="1GiB", **options)(params(), batch()))
    jax.effects_barrier()
    assert ran == [1]


@BOTH
def test_two_threads_run_one_step(transport):
    budgeted = vmem_jax.jit(step, plan=moving(step, params(), batch()), transport=transport)
    expected = budgeted(params(), batch())
    results = []
    run = lambda: results.extend(budgeted(params(), batch()) for _ in range(3))
    in_threads(run, run)
    assert len(results) == 6 and all(same(r, expected) for r in results)


@BOTH
def test_a_saved_plan_belongs_to_no_transport(transport, tmp_path):
    moving(step, params(), batch()).save(tmp_path / "step.json")
    budgeted = vmem_jax.jit(step, plan=Plan.load(tmp_path / "step.json"), transport=transport)
    assert budgeted.lower(params(), batch()).compile().transport == transport


def test_inside_another_jit_xlas_copies_move_and_the_calls_say_why_not():
    plan = moving(step, params(), batch())
    expected = vmem_jax.jit(step, budget="1GiB", policy="exact")(params(), batch())
    inner = vmem_jax.jit(step, plan=plan, transport="memory_kinds")
    outer = jax.jit(lambda p, x: inner(p, x))
    for a, b in zip(*map(jax.tree.leaves, (outer(params(), batch()), expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    inner = vmem_jax.jit(step, plan=plan, transport="ffi")
    with pytest.raises(ValueError, match="cannot offload: it is called inside another jit"):
        jax.jit(lambda p, x: inner(p, x))(params(), batch())


def test_on_a_cpu_xlas_copies_free_nothing_and_the_budget_still_holds():
    options = {"allow": ("order", "offload"), "machine": FAST, "transport": "memory_kinds"}
    with pytest.raises(BudgetError, match="compiled peak"):
        vmem_jax.jit(step, budget=0.5, **options)(params(), batch())


def test_xlas_own_pool_of_host_memory_is_a_limit(monkeypatch):
    budgeted = vmem_jax.jit(
        step, plan=moving(step, params(), batch()), transport="memory_kinds", host_budget="1GiB"
    )
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")
    with pytest.raises(HostMemoryError, match="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        budgeted(params(), batch())


CHOICES = [  # wanted, platform, process of every device, inlined, CUDA built -> transport, or why not
    ("auto", "gpu", [0], False, True, "ffi"),
    ("auto", "gpu", [0], False, False, "memory_kinds"),
    ("auto", "gpu", [0, 0], False, True, "ffi"),
    ("auto", "gpu", [0, 0, "no mesh"], False, True, "memory_kinds"),
    ("auto", "gpu", [0, 1], False, True, "memory_kinds"),
    ("auto", "gpu", [0], True, True, "memory_kinds"),
    ("auto", "cpu", [0], False, True, "ffi"),
    ("auto", "cpu", [0], True, True, "why: it is called inside another jit"),
    ("auto", "cpu", [0, 0, "no mesh"], False, True, "why: it runs on 2 devices"),
    ("ffi", "gpu", [0], False, False, "why: vmem_jax's native extension was built without CUDA"),
    ("ffi", "gpu", [0, 0], False, True, "ffi"),
    ("ffi", "gpu", [0, 0, "no mesh"], False, True, "why: it runs on 2 devices"),
    ("ffi", "gpu", [0, 1], False, True, "why: 1 of its 2 devices belong to other processes"),
    ("memory_kinds", "gpu", [0], False, True, "memory_kinds"),
    ("memory_kinds", "cpu", [0], False, True, "memory_kinds"),
]


@pytest.mark.parametrize("wanted, platform, where, inlined, cuda, expected", CHOICES)
def test_which_way_is_taken(monkeypatch, wanted, platform, where, inlined, cuda, expected):
    class Extension:
        targets = staticmethod(lambda: {"cpu", "CUDA"} if cuda else {"cpu"})

    monkeypatch.setattr(ffi.extension, "load", lambda: Extension)
    devices = [SimpleNamespace(process_index=p) for p in where if p != "no mesh"]
    spread = len(devices) > 1 and "no mesh" not in where
    mesh = jax.sharding.AbstractMesh((len(devices),), ("data",)) if spread else None
    name, why = choose(wanted, platform, devices, mesh, inlined)
    assert (name or f"why: {why}").startswith(expected)
    assert bool(name) != bool(why)


def test_without_the_extension_a_cpu_says_what_to_install(monkeypatch):
    def missing():
        raise ImportError("vmem_jax's native extension is not built here.")

    monkeypatch.setattr(ffi.extension, "load", missing)
    assert choose("auto", "gpu", jax.devices()[:1], None, False) == ("memory_kinds", "")
    with pytest.raises(ValueError, match=r"cannot offload: vmem_jax's .* not built.*XLA:CPU"):
        vmem_jax.jit(step, budget=0.5, allow="offload")(params(), batch())
    both = {"allow": ("order", "offload")}  # one of which can be used
    text = str(vmem_jax.jit(step, budget="1GiB", **both).explain(params(), batch()))
    assert re.search(r"offload is not used: vmem_jax's .*not\s+built", text)
    with pytest.raises(BudgetError, match="not built"):
        vmem_jax.jit(step, budget=0.5, sub_batches=1, **both)(params(), batch())


def test_an_unknown_transport_is_refused_at_once():
    with pytest.raises(ValueError, match=r"`transport`='pcie' is unknown; there is auto, ffi, mem"):
        vmem_jax.jit(step, budget=0.5, transport="pcie")
