"""Steps in which values wait for the backward pass compressed: the same bits, in less memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from built import needs_cuda
from jax import lax
from jax.extend.core import jaxpr_as_fun
from steps import CASES, normal

import vmem_jax
from vmem_jax import Plan, PlanError
from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.compression import compressed_nbytes
from vmem_jax.core.costs import analytic
from vmem_jax.core.program import COMPRESS, Phase
from vmem_jax.core.validate import check_program
from vmem_jax.errors import show_nbytes
from vmem_jax.policy import Auto, Keep
from vmem_jax.policy.offload_choice import candidates
from vmem_jax.policy.recomputation import Recomputation
from vmem_jax.policy.vdnnpp import VDNNpp
from vmem_jax.profile.density import densities
from vmem_jax.rewrite import rewrite
from vmem_jax.rewrite.compression import compressed, compressible, rectified, sites
from vmem_jax.transfer import compression
from vmem_jax.transfer.compression import Store
from vmem_jax.transfer.extension import describe

pytestmark = pytest.mark.skipif(
    describe().startswith("none"), reason=f"native extension: {describe()}"
)

SLOW = dataclasses.replace(
    CARDS["cpu"].machine,
    flops={"": 5e12},
    bandwidth=1e12,
    link_out=2e10,
    link_in=2e10,
    link_both=4e10,
)
"""A machine whose link holds up what it moves, so that fewer bytes on it are a gain."""

MEANS = ("order", "offload", "compress")


def layered(activate, layers=10):
    """A training step of `layers` matrix products, with `activate` behind each."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = activate(y @ w)
            return jnp.square(y).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    weights = [normal(i, (64, 64), jnp.float32, 0.18) for i in range(layers)]
    return step, (weights, normal(99, (2048, 64), jnp.float32))


def masked(y):
    return jnp.where(lax.iota(jnp.int32, y.size).reshape(y.shape) % 3 == 0, y, 0.0)


def shared(y):
    """Read by the next layer in two ways, and by the backward pass in two."""
    y = jax.nn.relu(y)
    return 0.5 * y * jnp.tanh(y).mean(0) + 0.5 * y[::-1]


STEPS = {
    "relu": layered(jax.nn.relu),
    "relu6": layered(jax.nn.relu6),
    "dense": layered(lambda y: jnp.tanh(0.1 * y)),
    "mask": layered(masked),
    "mask as a factor": layered(lambda y: y * (y > 0.1)),
    "shared": layered(shared),
    **{case.name: case.make(jnp.float32, 1) for case in CASES if case.name == "vgg"},
}


def same_bits(a, b):
    bits = lambda x: np.asarray(x).tobytes()
    return all(bits(x) == bits(y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def close(a, b):
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return all(np.allclose(x, y, atol=1e-5 * np.abs(y).max()) for x, y in pairs)


def captured(step, args):
    return capture(jax.make_jaxpr(step)(*args))


def room(found, b, density):
    aval = found.variables[b].aval
    return compressed_nbytes(aval.size, aval.dtype.itemsize, density)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("density", [1.0, 0.0], ids=["all fits", "all overflows"])
def test_the_backward_pass_reads_what_was_compressed(name, density):
    step, args = STEPS[name]
    found = captured(step, args)
    every = compressible(found, 0)
    assert len(every) >= 5
    other = compressed(found, [(b, room(found, b, density)) for b in every])
    program = other.program
    assert check_program(program) == []
    assert sum(step.op == COMPRESS for step in program.steps) == len(every)
    for b in every:  # nothing of the backward pass reads the value itself
        readers = program.readers[other.variables.index(found.variables[b])]
        assert all(program.steps[r].phase is Phase.FORWARD for r in readers)
    with Store(sites(other)) as store:
        store.open(jax.devices()[0])
        costs = analytic(program, CARDS["cpu"].machine)
        jaxpr = rewrite(other, Keep().plan(program, costs, None), store=store.id)
        leaves = jax.tree.leaves(args)
        run = lambda closed: jax.block_until_ready(jax.jit(jaxpr_as_fun(closed))(*leaves))
        alike = close if name in ("shared", "vgg") else same_bits  # there other fusions are left
        assert alike(run(jaxpr), run(found.flat))
        counters = store.counters(jax.devices()[0])
    assert all(site.runs == 1 for site in counters)
    assert any(site.overflow_nbytes for site in counters) == (density == 0.0)


@pytest.mark.parametrize(
    "name, expected",
    [("relu", 10), ("relu6", 10), ("mask", 10), ("mask as a factor", 9), ("dense", 0)],
)
def test_what_has_zeros_is_told_from_the_equations(name, expected):
    found = captured(*STEPS[name])
    assert len(rectified(found, compressible(found, 0.02))) == expected


def test_what_is_compressed_is_as_much_worth_a_transfer_as_before():
    found = captured(*STEPS["relu"])
    large = compressible(found, 0.02)
    other = compressed(found, [(b, room(found, b, 0.5)) for b in large])
    moved = []
    for program in (found.program, other.program):
        costs, base = analytic(program, SLOW), range(len(program.steps))
        moved.append({b for b, _ in candidates(Recomputation(program, base), costs, 0.02)})
    small = {b for s in other.program.steps if s.op == COMPRESS for b in s.writes}
    assert len(moved[1] & small) >= len(moved[0] & {*large}) > 0  # their copies take less time, too


def budgeted(name="relu", budget=0.5, **options):
    step, args = STEPS[name]
    options = {"allow": MEANS, "machine": SLOW, **options}
    return vmem_jax.jit(step, budget=budget, **options), args


def test_a_link_that_holds_the_step_up_carries_less():
    raw, args = budgeted(allow=("order", "offload"))
    step, _ = budgeted(policy=Auto(allow=MEANS, cache=False))  # all that moves crosses the link
    before, after = raw.lower(*args).compile(), step(*args) and step.lower(*args).compile()
    plan = after.plan
    assert plan.compressed and not plan.recomputed
    assert plan.predicted_seconds < before.plan.predicted_seconds
    assert after.need_nbytes <= 0.5 * before._entry.plain_need
    program = after._entry.traced.captured.program
    assert all(program.producer[t.buffer] >= 0 for t in plan.transfers)
    assert any(program.steps[program.producer[t.buffer]].op == COMPRESS for t in plan.transfers)
    exact = vmem_jax.jit(STEPS["relu"][0], budget="1GiB", policy="exact")(*args)
    for _ in range(2):
        assert same_bits(step(*args), exact)
    counters = after.arena.counters(jax.devices()[0])
    assert counters.link_nbytes_out == 3 * after.moved_nbytes  # three runs
    sites = after.compression.counters(jax.devices()[0])
    assert all(site.runs == 3 and 0.4 < site.density < 0.6 for site in sites)
    assert not any(site.overflow_nbytes for site in sites)
    explanation = step.explain(*args).summary()
    assert f"{len(plan.compressed)} values wait compressed" in explanation
    arena = after.arena.layout.nbytes
    assert f"{show_nbytes(arena)} are pinned for what moves" in explanation


def test_what_is_pinned_stays_within_the_host_budget():
    fast = dataclasses.replace(SLOW, link_out=1e12, link_in=1e12, link_both=2e12)
    raw, args = budgeted(allow=("order", "offload"), machine=fast)
    pinned = raw.lower(*args).compile().pinned_nbytes
    step, _ = budgeted(machine=fast, host_budget=int(0.8 * pinned))
    compiled = step.lower(*args).compile()
    assert compiled.plan.compressed and 0 < compiled.pinned_nbytes <= 0.8 * pinned
    assert same_bits(step(*args), raw(*args))
    with pytest.raises(vmem_jax.HostMemoryError):
        budgeted(allow=("order", "offload"), machine=fast, host_budget=int(0.8 * pinned))[0](*args)


def test_a_tensor_that_turns_dense_overflows_and_is_right():
    step, (weights, x) = budgeted()
    assert step(weights, x) and step.plan(weights, x).compressed
    weights, x = [jnp.abs(w) for w in weights], jnp.abs(x)  # no ReLU gives a zero now
    exact = vmem_jax.jit(STEPS["relu"][0], budget="1GiB", policy="exact")(weights, x)
    for _ in range(2):
        assert same_bits(step(weights, x), exact)
    sites = step.lower(weights, x).compile().compression.counters(jax.devices()[0])
    assert all(site.overflow_nbytes > 0 for site in sites)


def test_without_a_transfer_it_takes_less_memory_too():
    step, args = budgeted(allow=("order", "compress"), budget=0.55, density=0.5)
    plan = step.plan(*args)
    assert plan.compressed and not plan.moves
    assert same_bits(
        step(*args), vmem_jax.jit(STEPS["relu"][0], budget="1GiB", policy="exact")(*args)
    )
    with pytest.raises(vmem_jax.BudgetError):
        vmem_jax.jit(STEPS["relu"][0], budget=0.55, allow="order", machine=SLOW).plan(*args)


def test_a_plan_is_saved_with_it(tmp_path):
    step, args = budgeted(density=0.5)
    plan = step.plan(*args)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.compressed
    again = vmem_jax.jit(STEPS["relu"][0], plan=loaded)
    assert same_bits(again(*args), step(*args))
    for other in ("dense", "mask"):
        with pytest.raises(PlanError, match="another step"):
            fun, others = STEPS[other]
            vmem_jax.jit(fun, plan=loaded)(*others)


def test_a_policy_by_layers_moves_what_is_compressed():
    fun, args = STEPS["vgg"]
    step = vmem_jax.jit(
        fun, budget=0.9, policy=VDNNpp("conv"), allow=MEANS, machine=SLOW, density=0.5
    )
    entry = step._entry_for(args, {}, None)
    program, plan = entry.traced.captured.program, entry.best.plan
    small = {program.producer[t.buffer] for t in plan.transfers}
    assert plan.compressed and any(program.steps[s].op == COMPRESS for s in small)
    exact = vmem_jax.jit(fun, budget="1GiB", policy="exact")(*args)
    assert close(step(*args), exact)


def test_a_policy_by_layers_compresses_where_its_first_prediction_moves_nothing():
    """It compiles to more than predicted; then what moves next waits compressed."""
    fun, args = STEPS["vgg"]
    step = vmem_jax.jit(fun, budget=0.45, policy=VDNNpp(), allow=MEANS, machine=SLOW, density=0.5)
    entry = step._entry_for(args, {}, None)
    first, *_, last = entry.attempts
    assert not first.plan.transfers and not first.plan.compressed and first.need > entry.budget
    assert last.plan.compressed and last.need <= entry.budget
    assert "compress" not in entry.log.skipped
    exact = vmem_jax.jit(fun, budget="1GiB", policy="exact")(*args)
    assert close(step(*args), exact)
    wide = vmem_jax.jit(fun, budget="1GiB", policy=VDNNpp(), allow=MEANS, density=0.5)
    assert "moves nothing" in wide._entry_for(args, {}, None).log.skipped["compress"]


def test_vdnnpp_pins_less_by_what_its_moved_values_save():
    fun, args = STEPS["vgg"]
    entries = []
    for allow in (MEANS[:2], MEANS):
        step = vmem_jax.jit(fun, budget="1GiB", policy=VDNNpp("all"), allow=allow, density=0.5)
        entries.append((step._entry_for(args, {}, None), step(*args)))
    (dense, expected), (small, found) = entries
    moved = lambda entry: sum(
        entry.traced.captured.program.buffers[t.buffer].nbytes for t in entry.best.plan.transfers
    )
    assert small.best.plan.compressed and len(small.best.plan.transfers) > 0
    assert moved(small) < 0.9 * moved(dense)
    assert close(found, expected)


def test_densities_are_counted_on_the_arguments():
    step, args = STEPS["mask"]
    found = captured(step, args)
    leaves, large = jax.tree.leaves(args), compressible(found, 0.02)
    counted = densities(found, large, leaves, None)
    assert [*counted] == [*large]
    assert all(abs(counted[b] - 1 / 3) < 1e-3 for b in rectified(found, large))
    assert "takes" in densities(found, large, leaves, 1000)
    assert densities(found, large, [jnp.zeros_like(x) for x in leaves], None)[large[0]] == 0


BAD = [
    ({"density": 1.5}, ValueError, "from 0 to 1. Got 1.5"),
    ({"density": "0.5"}, TypeError, "must be a number"),
    (
        {"shapes": True, "allow": "compress"},
        ValueError,
        "shapes alone, which tell no zeros: call it, or give `density`",
    ),
]


@pytest.mark.parametrize("how, error, match", BAD, ids=[str([*how]) for how, *_ in BAD])
def test_bad_input(how, error, match):
    with pytest.raises(error, match=match):
        shapes = how.pop("shapes", False)
        step, args = budgeted(**how)
        if shapes:
            args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        step.plan(*args)


def test_an_extension_without_kernels_cannot_compress(monkeypatch):
    monkeypatch.setattr(compression, "unusable", lambda platform: f"no nvcc for the {platform}")
    step, args = budgeted(allow="compress")
    with pytest.raises(ValueError, match="cannot compress: no nvcc for the cpu"):
        step.plan(*args)
    step, args = budgeted(budget=0.9)  # where other techniques are allowed they are used
    assert not step.plan(*args).compressed
    assert "compress is not used: no nvcc for the cpu" in step.explain(*args).summary()


def test_a_device_where_nothing_could_overflow_is_refused(monkeypatch):
    def refuse(store, device):
        raise RuntimeError("it has no concurrentManagedAccess")

    monkeypatch.setattr(Store, "open", refuse)
    step, args = budgeted(allow="compress")
    with pytest.raises(ValueError, match="cannot compress: it has no concurrentManagedAccess"):
        step.plan(*args)


@pytest.mark.parametrize(
    "options, why",
    [
        (
            {"name": "dense", "budget": 0.7},
            "of its 10 large residuals none has enough zeros: of the emptiest 100%",
        ),
        ({"budget": 1.0}, "it fits without"),
        ({"sub_batches": 2, "budget": 0.9}, "its batch runs in sub-batches"),
    ],
    ids=["dense", "fits", "sub-batches"],
)
def test_what_is_not_compressed_says_why(options, why):
    step, args = budgeted(**options)
    assert not step.plan(*args).compressed
    assert f"compress is not used: {why}" in step.explain(*args).summary()


def test_it_is_not_planned_unless_it_is_named():
    step, args = budgeted(allow=None)
    assert not step.plan(*args).compressed
    summary = step.explain(*args).summary().replace("test_compressed_steps.py", "")
    assert "compress" not in summary


@pytest.mark.gpu_compile
def test_it_fits_a_card_that_is_not_there():
    needs_cuda()
    step, (weights, x) = STEPS["relu"]
    args = weights, jax.ShapeDtypeStruct((1 << 18, 64), x.dtype)
    options = {"allow": MEANS, "density": 0.5, "donate_argnums": 0}
    entry = vmem_jax.jit(step, budget=0.55, machine=SLOW, **options)._entry_for(args, {}, "h200")
    plan, text = entry.best.plan, entry.best.compiled.as_text()
    assert entry.best.need <= 0.55 * entry.plain_need
    assert plan.compressed and plan.transfers and not plan.recomputed
    for name in ("compress", "decompress"):
        assert text.count(f'custom_call_target="vmem_jax_{name}"') == len(plan.compressed)
