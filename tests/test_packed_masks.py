"""Masks that wait for the backward pass in bits: their bytes, what reads them, values, plans.

The steps compute with small whole numbers, of which no sum rounds, so that results are equal however
XLA fuses and orders them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.api import planner
from vmem_jax.capture import capture
from vmem_jax.capture.batch import Batch, follow_batch
from vmem_jax.capture.bits import pack_p, packed_aval, unpack_p
from vmem_jax.capture.layouts import Layout
from vmem_jax.capture.loop_levels import levels
from vmem_jax.capture.packed_masks import saved_nbytes, with_packed_masks
from vmem_jax.capture.shards import Shards, follow_shards
from vmem_jax.capture.sub_batches import divided
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Phase
from vmem_jax.rewrite.sub_batches import looped
from vmem_jax.techniques.bits import with_bits

LAYERS, SAMPLES, TOKENS, WIDTH = 3, 6, 16, 32


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


def leaky(x, key):
    del key
    return jnp.where(x > 1, x, -x)


def both(x, key):
    """With a mask and its complement."""
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(mask, x, -x) + jnp.where(~mask, x, 0)


def step_of(drop, scanned=False, checkpointed=False):
    """A step of layers of frozen weights: of a layer the backward pass reads its masks alone."""

    def layer(x, w, key):
        first, second = jax.random.split(key)
        return drop(drop(x, first) @ w, second) @ w

    layer = jax.checkpoint(layer) if checkpointed else layer

    def step(bias, weights, x, key):
        def loss(bias):
            y, keys = x + bias, jax.random.split(key, LAYERS)
            if scanned:
                once = lambda y, given: (layer(y, *given), None)
                y = jax.lax.scan(once, y, (jnp.stack(weights), keys))[0]
            else:
                for i in range(LAYERS):
                    y = layer(y, weights[i], keys[i])
            return jnp.sum(y, dtype=jnp.float32)

        value, gradient = jax.value_and_grad(loss)(bias)
        return bias - gradient, value

    return step


def arguments(samples=SAMPLES, tokens=TOKENS, width=WIDTH):
    rows = np.random.default_rng(0)
    x = rows.integers(-3, 4, (samples, tokens, width)).astype(np.float32)
    weights = [jnp.eye(width)[rows.permutation(width)] for _ in range(LAYERS)]
    return jnp.ones(width), weights, jnp.asarray(x), jax.random.key(0)


def captured_of(step, args, **options):
    return capture(jax.jit(step).trace(*args).jaxpr, **options)


def packs(jaxpr):
    return [eqn for eqn in compat.open_jaxpr(jaxpr).eqns if eqn.primitive is pack_p]


def masks_read_late(program):
    """The masks that the backward pass reads from memory."""
    late = {b for s in program.steps if s.phase is not Phase.FORWARD for b in s.reads}
    made = {b for s in program.steps if s.phase is Phase.FORWARD for b in s.writes}
    return [b for b in late & made if "bool" in program.buffers[b].label]


def assert_equal(results, expected):
    jax.tree.map(np.testing.assert_array_equal, results, expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_eight_neighbours_are_one_byte(axis):
    mask = np.random.default_rng(1).random((8, 16, 24)) < 0.5
    packed = jax.jit(lambda x: pack_p.bind(x, axis=axis))(mask)
    np.testing.assert_array_equal(packed, np.packbits(mask, axis=axis, bitorder="little"))
    assert packed.shape == packed_aval(jax.typeof(jnp.asarray(mask)), axis).shape
    np.testing.assert_array_equal(jax.jit(lambda x: unpack_p.bind(x, axis=axis))(packed), mask)


@pytest.mark.parametrize("drop", [dropped, leaky, both])
def test_the_backward_pass_reads_bits(drop):
    step, args = step_of(drop), arguments()
    captured = captured_of(step, args)
    masks = 2 * LAYERS - (drop is leaky)  # the first of an argument is made again
    assert len(masks_read_late(captured.program)) == masks
    packed = with_packed_masks(captured.separate, Shards(), 1)
    assert len(packs(packed)) == masks
    assert saved_nbytes(packed) == masks * SAMPLES * TOKENS * WIDTH * 7 // 8
    assert masks_read_late(captured.rewritten(packed).program) == []
    results = jax.jit(jaxpr_as_fun(packed))(*jax.tree.leaves(args))
    assert_equal(results, jax.tree.leaves(jax.jit(step)(*args)))


@pytest.mark.parametrize(("drop", "read"), [(dropped, True), (leaky, False)])
def test_the_forward_pass_reads_bits_where_it_read_the_mask_from_memory(drop, read):
    captured = captured_of(step_of(drop), arguments())
    program = captured.rewritten(with_packed_masks(captured.separate, Shards(), 1)).program
    early = {b for s in program.steps if s.phase is Phase.FORWARD for b in s.reads}
    assert any("uint8" in program.buffers[b].label for b in early) == read


@pytest.mark.parametrize(
    ("drop", "checkpointed", "masks"),
    [(dropped, False, 2), (leaky, True, 1)],  # one is made of what is carried in
)
def test_loops_stack_bits(drop, checkpointed, masks):
    captured = captured_of(step_of(drop, True, checkpointed), arguments())
    shards = follow_shards(captured.separate, ())
    [(pair, _)] = levels(captured.separate, shards).in_bits(1).all_pairs
    assert len(packs(pair.body)) == masks
    eqns = compat.open_jaxpr(pair.body).eqns
    unpacked = {v for eqn in eqns if eqn.primitive is unpack_p for v in eqn.outvars}
    late = [eqn for eqn in eqns if not pair.late.isdisjoint(eqn.outvars)]
    assert len(unpacked.intersection(a for eqn in late for a in eqn.invars)) == masks


@pytest.mark.parametrize(
    ("sizes", "axis"),
    [
        ({}, 1),  # of 16 tokens; the width is the fastest
        ({"tokens": 15}, 2),
        ({"tokens": 15, "width": 30, "samples": 8}, None),  # sub-batches divide samples
    ],
)
def test_the_axis_of_a_mask(sizes, axis):
    captured = captured_of(step_of(dropped), arguments(**sizes))
    found = {e.params["axis"] for e in packs(with_packed_masks(captured.separate, Shards(), 1))}
    assert found == (set() if axis is None else {axis})


def test_a_mask_is_packed_along_an_axis_that_no_device_divides():
    bias, weights, x, key = arguments()
    mesh = jax.sharding.AbstractMesh((2,), ("tokens",))
    split = jax.NamedSharding(mesh, jax.P(None, "tokens"))
    whole = jax.NamedSharding(mesh, jax.P())
    shardings = [whole, *[whole] * LAYERS, split, whole]
    drop = lambda x, key: jnp.where(x > jax.random.randint(key, (), 0, 2), x, 0)
    captured = captured_of(step_of(drop), (bias, weights, x, key), shardings=shardings)
    shards = follow_shards(captured.separate, shardings)
    found = packs(with_packed_masks(captured.separate, shards, 1))
    assert found and {eqn.params["axis"] for eqn in found} == {2}


def test_small_masks_and_results_stay():
    step = step_of(dropped)
    captured = captured_of(step, arguments())
    nbytes = SAMPLES * TOKENS * WIDTH
    assert packs(with_packed_masks(captured.separate, Shards(), nbytes))
    assert with_packed_masks(captured.separate, Shards(), nbytes + 1) is captured.separate

    def returned(x, key):
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        return jax.grad(lambda x: jnp.sum(jnp.where(mask, jnp.sin(x), 0)))(x), mask

    flat = captured_of(returned, arguments()[2:]).separate
    assert with_packed_masks(flat, Shards(), 1) is flat


def test_masks_of_many_layers_are_packed_each_a_small_part_of_all():
    """Of 48 layers a mask is a 3,876th of all temporaries."""
    layers, sizes = 48, jax.ShapeDtypeStruct((64, 512), jnp.float32)
    wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 2048), (2048, 512))]

    def loss(weights, x, key):
        for (up, down), each in zip(weights, jax.random.split(key, layers), strict=True):
            x = x + dropped(jnp.tanh(x @ up) @ down, each)
        return jnp.sum(x)

    key = jax.eval_shape(jax.random.key, 0)
    step = vmem_jax.jit(jax.grad(loss), budget=1.0).context(
        ([wide] * layers, sizes, key), {}, "h200"
    )
    program = step.traced.captured.program
    temporary = np.array([b.nbytes for b in program.buffers])[~np.array(program.is_resident)]
    assert 64 * 512 * 2000 < temporary.sum()
    assert len(packs(with_bits(step).traced.captured.separate)) == layers


def test_a_mask_stays_with_the_maximum_that_it_is_of():
    """A plan that makes one again makes both (`ties`)."""
    below = lambda x, key: x - jnp.max(x, -1, keepdims=True)
    captured = captured_of(step_of(below), arguments())
    assert masks_read_late(captured.program)
    assert with_packed_masks(captured.separate, Shards(), 1) is captured.separate


@pytest.mark.parametrize(
    ("drop", "scanned", "masks"), [(leaky, False, 2 * LAYERS - 1), (dropped, True, 2 * LAYERS)]
)
def test_masks_need_an_eighth(drop, scanned, masks):
    step, args = step_of(drop, scanned), arguments(12, 64, 128)
    expected, allow = jax.jit(step)(*args), ("order", "recompute")
    whole = vmem_jax.jit(step, budget=0.9, allow=allow).lower(*args).compile()
    budget = vmem_jax.lowest(step, *args, allow=allow).nbytes - 1
    budgeted = vmem_jax.jit(step, budget=budget, allow=(*allow, "bits"))
    assert_equal(budgeted(*args), expected)
    compiled = budgeted.lower(*args).compile()
    assert compiled.plan.bits and not compiled.plan.recomputed
    assert whole.need_nbytes - compiled.need_nbytes == masks * (12 * 64 * 128) * 7 // 8


@pytest.mark.parametrize("drop", [dropped, leaky])
def test_sub_batches_pack_their_own_masks(drop):
    """Of 6 samples in parts of 4: the last part is smaller."""
    step, args = step_of(drop), arguments()
    packed = with_packed_masks(captured_of(step, args).separate, Shards(), 1)
    layouts = [Layout(0) if a is args[2] else None for a in jax.tree.leaves(args)]
    batch = follow_batch(packed, layouts, SAMPLES)
    assert isinstance(batch, Batch)
    part, parts = divided(packed, batch, 2, 4)
    assert 4 in {eqn.invars[0].aval.shape[0] for eqn in packs(part)}
    results = jax.jit(jaxpr_as_fun(looped(part, parts, parts.smaller)))(*jax.tree.leaves(args))
    assert_equal(results, jax.tree.leaves(jax.jit(step)(*args)))


def test_a_plan_in_sub_batches_is_loaded_again(tmp_path):
    step, args = step_of(leaky), arguments(14, 64, 128)
    options = {"sub_batches": 4, "batch_argnums": 2}
    allow = ("order", "recompute", "sub_batches")
    budget = vmem_jax.lowest(step, *args, allow=allow, **options).nbytes - 1
    budgeted = vmem_jax.jit(step, budget=budget, allow=(*allow, "bits"), **options)
    expected = jax.jit(step)(*args)
    assert_equal(budgeted(*args), expected)
    plan = budgeted.plan(*args)
    assert plan.bits and plan.sub_batches == 4
    assert "masks in bits" in str(budgeted.explain(*args))
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=Plan.load(tmp_path / "plan.json"), **options)
    assert_equal(again(*args), expected)


def test_a_step_that_fits_keeps_bytes():
    step, args = step_of(leaky), arguments(12, 64, 128)
    assert not vmem_jax.jit(step, budget=1.0, allow=("order", "bits")).plan(*args).bits


def test_a_plan_may_make_bits_again():
    """Where the budget leaves no room for them, from the random key."""
    captured = captured_of(step_of(dropped), arguments())
    program = captured.rewritten(with_packed_masks(captured.separate, Shards(), 1)).program
    packs = lambda s: any("uint8" in program.buffers[b].label for b in s.writes)
    again = [s for s in program.steps if packs(s) and s.pure]
    assert len(again) == 2 * LAYERS
    assert {s.op for s in again} == {"random_bits"}  # no mask exists beside its bits


def test_why_masks_stay_in_bytes():
    step = step_of(dropped)
    odd = arguments(tokens=15, width=30)
    with pytest.raises(vmem_jax.TechniqueError, match="divides by eight"):
        vmem_jax.jit(step, budget=0.9, allow="bits")(*odd)
    assert not vmem_jax.jit(step, budget=1.0).plan(*odd).bits


def test_what_bits_take_too_much_is_taken_off_for_bytes(monkeypatch):
    """A form that compiles to more than was predicted lowers what the other is planned for."""
    found, groups_of = [], planner.groups_of
    seen = lambda *given: found.append(groups_of(*given)) or found[-1]
    monkeypatch.setattr(planner, "groups_of", seen)
    step, args = step_of(leaky), arguments(12, 64, 128)
    budget = vmem_jax.lowest(step, *args, allow=("order", "recompute")).nbytes
    found.clear()
    allow = "order", "recompute", "bits"
    vmem_jax.jit(step, budget=int(0.95 * budget), allow=allow).plan(*args)
    [[first, *_]] = found
    assert len(first) == 2 and all(family.alike for family in first)


@pytest.mark.gpu_compile
def test_bits_are_tried_where_recomputation_fits_but_takes_longer():
    """Masks in bytes are expected to fit, and do not; recomputation does, and takes 14 % longer."""
    step, args = step_of(leaky), arguments(64, 512, 512)
    allow = "order", "recompute", "bits"
    planned = vmem_jax.jit(step, budget="320MiB", allow=allow).lower(*args).compile(target="h200")
    assert planned.plan.bits
    assert planned.need_nbytes <= 320 * 2**20
