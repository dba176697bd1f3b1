"""Loops that stack slices without their zeros: the same bits, in less memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from built import needs_cuda
from jax import lax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.compression import compressed_nbytes
from vmem_jax.core.costs import analytic
from vmem_jax.core.validate import check_program
from vmem_jax.policy.exact import Exact
from vmem_jax.profile.density import densities
from vmem_jax.rewrite import rewrite
from vmem_jax.rewrite.compression import compressed, compressible, rectified, sites, slices_of
from vmem_jax.transfer import compression
from vmem_jax.transfer.compression import Store
from vmem_jax.transfer.extension import describe

WITHOUT = describe() if describe().startswith("none") else compression.unusable_in_loops()
pytestmark = pytest.mark.skipif(bool(WITHOUT), reason=f"native extension: {WITHOUT}")

LAYERS = 24
CPU = CARDS["cpu"].machine
SLOW = dataclasses.replace(CPU, flops={"": 1e9}, bandwidth=1e12)
"""A machine on which products take so long that none is computed twice for bytes alone."""

LINKED = dataclasses.replace(SLOW, flops={"": 5e12}, link_out=2e10, link_in=2e10, link_both=4e10)
"""A machine whose link holds up what it moves."""


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.3, shape), jnp.float32)


def scanned(activate, **scan):
    """A training step over stacked layers of two products, `activate` between them."""

    def step(w, x):
        def loss(w):
            layer = lambda y, w: (y + activate(y @ w[0]) @ w[1], None)
            return jnp.square(lax.scan(layer, x, w, **scan)[0]).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    return step


relu = scanned(jax.nn.relu)
ARGS = (normal(1, LAYERS, 16, 64), normal(2, LAYERS, 64, 16)), normal(3, 1024, 16)
STEPS = {
    "relu": relu,
    "reverse": scanned(jax.nn.relu, reverse=True),
    "mask": scanned(lambda y: y * (y > 0.1)),
    "dense": scanned(lambda y: jnp.tanh(0.1 * y)),
}


def captured_of(step, args=ARGS):
    return capture(jax.make_jaxpr(step)(*args), platform="cpu")


def stacks_of(captured):
    return [b for b in compressible(captured, 0) if slices_of(captured, b) > 1]


def room(captured, b, density):
    x, slices = captured.variables[b].aval, slices_of(captured, b)
    return slices * compressed_nbytes(x.size // slices, x.dtype.itemsize, density)


def plan_of(captured):
    return Exact().plan(captured.program, analytic(captured.program, CPU), None)


def same_bits(a, b):
    bits = lambda x: np.asarray(x).tobytes()
    return all(bits(x) == bits(y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("density", [1.0, 0.0], ids=["all fits", "all overflows"])
def test_the_backward_loop_reads_what_was_compressed(name, density):
    found = captured_of(STEPS[name])
    stacks = stacks_of(found)
    made = compressed(found, [(b, room(found, b, density)) for b in stacks])
    assert stacks and check_program(made.program) == []
    with Store(sites(made)) as store:
        store.open(jax.devices()[0])
        run = jax.jit(jaxpr_as_fun(rewrite(made, plan_of(made), None, store.id)))
        for _ in range(2):
            ours = run(*jax.tree.leaves(ARGS))
        counters = store.counters(jax.devices()[0])
    expected = jax.jit(jaxpr_as_fun(rewrite(found, plan_of(found))))(*jax.tree.leaves(ARGS))
    assert same_bits(ours, expected)
    assert all(site.runs == 2 * LAYERS for site in counters)
    assert all((site.overflow_nbytes > 0) == (density == 0) for site in counters)


@pytest.mark.parametrize(("name", "expected"), [("relu", 1), ("mask", 1), ("dense", 0)])
def test_what_has_zeros_is_told_from_the_body(name, expected):
    found = captured_of(STEPS[name])
    assert len(rectified(found, stacks_of(found))) == expected


def test_slices_of_a_loop_that_is_unrolled_are_not_compressed():
    """XLA may swap the calls of two iterations."""
    assert stacks_of(captured_of(relu))
    assert not stacks_of(captured_of(scanned(jax.nn.relu, unroll=2)))


def test_the_densest_slice_counts():
    weights, x = ARGS
    dense = weights[0].at[3].set(jnp.abs(weights[0][3])), weights[1]
    found = captured_of(relu)
    [b] = rectified(found, stacks_of(found))
    leaves = jax.tree.leaves((dense, jnp.abs(x)))
    whole = densities(found, [b], leaves, None)[b]
    assert densities(found, [b], leaves, None, [LAYERS])[b] > whole + 0.1


def test_a_step_needs_less_by_what_its_stack_does():
    options = {"machine": SLOW, "density": 0.6}
    exact = vmem_jax.jit(relu, budget="1GiB", policy="exact").lower(*ARGS).compile()
    step = vmem_jax.jit(relu, budget=0.85, allow=("order", "compress"), **options)
    plan, need = step.plan(*ARGS), step.lower(*ARGS).compile().need_nbytes
    [(_, held)] = plan.compressed
    saved = LAYERS * 1024 * 64 * 4 - held
    assert exact.need_nbytes - need == pytest.approx(saved, rel=0.2)
    assert same_bits(step(*ARGS), exact(*ARGS))
    summary = step.explain(*ARGS).summary()
    assert "1 stacks wait compressed, slice by slice" in summary
    with pytest.raises(vmem_jax.BudgetError):
        vmem_jax.jit(relu, budget=0.85, allow="order", machine=SLOW).plan(*ARGS)


def test_loops_that_stack_other_values_compress_them():
    """In less memory than these stacks take, and in less time than fewer stacks."""
    options = {"budget": 0.7, "machine": SLOW}
    step = vmem_jax.jit(relu, allow=("order", "recompute", "compress"), density=0.6, **options)
    plan = step.plan(*ARGS)
    assert plan.kept is not None and plan.compressed
    without = vmem_jax.jit(relu, allow=("order", "recompute"), **options)
    assert plan.predicted_seconds < without.plan(*ARGS).predicted_seconds
    for a, b in zip(*map(jax.tree.leaves, (step(*ARGS), jax.jit(relu)(*ARGS))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_loop_stacks_other_values_although_compression_is_named():
    step = vmem_jax.jit(relu, budget=0.5, allow=("order", "recompute", "compress"), density=0.6)
    plan = step.plan(*ARGS)
    assert plan.kept is not None and not plan.compressed
    why = "loops that stack other values do without"
    assert f"compress is not used: {why}" in step.explain(*ARGS).summary()


def test_what_turns_dense_overflows_and_is_right(tmp_path):
    """Also of stacks that go through host memory, and by a plan that was saved."""
    allow = ("order", "offload", "compress")
    step = vmem_jax.jit(relu, budget=0.6, allow=allow, machine=LINKED, density=0.6)
    plan = step.plan(*ARGS)
    assert plan.compressed and plan.looped
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(relu, plan=vmem_jax.Plan.load(tmp_path / "plan.json"))
    args = jax.tree.map(lambda x: 0.1 * jnp.abs(x), ARGS)  # no ReLU gives a zero now
    exact = vmem_jax.jit(relu, budget="1GiB", policy="exact")(*args)
    for _ in range(2):
        assert same_bits(step(*args), exact)
        assert same_bits(again(*args), exact)
    [site] = step.lower(*args).compile().compression.counters(jax.devices()[0])
    assert site.overflow_nbytes > 0


@pytest.mark.gpu_compile
def test_a_card_that_is_not_there_needs_less_by_what_its_stack_does():
    needs_cuda()
    x = jax.ShapeDtypeStruct((16384, 256), jnp.bfloat16)
    weights = (256, 1024), (1024, 256)
    w = tuple(jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16) for shape in weights)
    options = {"donate_argnums": 0}

    def compiled(**more):
        return vmem_jax.jit(relu, **options, **more).lower(w, x).compile(target="h200")

    exact = compiled(budget="100GiB", policy="exact")
    ours = compiled(budget=0.8, allow=("order", "compress"), density=0.5)
    [(_, held)] = ours.plan.compressed
    saved = LAYERS * 16384 * 1024 * 2 - held
    assert exact.need_nbytes - ours.need_nbytes == pytest.approx(saved, rel=0.1)
    for name in ("compress", "decompress"):
        assert ours.as_text().count(f'custom_call_target="vmem_jax_{name}"') == 1
