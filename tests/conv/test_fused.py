"""Convolutions with what stands behind them: found in a step, run as one, taken into the plan."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolutions import convolution
from jax import lax

import vmem_jax
from vmem_jax import UCuDNN
from vmem_jax.capture import capture
from vmem_jax.conv import cudnn
from vmem_jax.conv.call import TARGET, by_cudnn
from vmem_jax.conv.candidates import choices_of, front_of_variants
from vmem_jax.conv.database import Database, Entry, identity_of
from vmem_jax.conv.fused import fused_convolution
from vmem_jax.conv.layers import kernels_of
from vmem_jax.conv.slices import layouts, whole, with_epilogue
from vmem_jax.core.cards import CARDS
from vmem_jax.core.convolution import XLA, Configuration, Epilogue, Micro
from vmem_jax.core.costs import analytic
from vmem_jax.core.plan import keep_plan
from vmem_jax.core.validate import violations
from vmem_jax.transfer import extension

NONE, BIAS, BOTH, _ = Epilogue
K = 6


def conv(x, w, spec=("NHWC", "HWIO", "NHWC")):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=spec)


# what follows the convolution, of y, (K,) values and y's like; what of it cuDNN can do in one
BEHIND = {
    "nothing": (lambda y, b, z: y, NONE, 0),
    "bias": (lambda y, b, z: y + b, BIAS, 2),
    "bias first": (lambda y, b, z: b[None, None, None] + y, BIAS, 2),
    "relu": (lambda y, b, z: jax.nn.relu(y), NONE, 2),
    "bias and relu": (lambda y, b, z: jax.nn.relu(y + b), BOTH, 2),
    "something else to add": (lambda y, b, z: jax.nn.relu(y + z), NONE, 2),
    "two things to add": (lambda y, b, z: y + b + z, NONE, 2),
    "another maximum": (lambda y, b, z: jnp.maximum(y + b, 0.5), NONE, 2),
    "a bias by rows": (lambda y, b, z: y + b[:, None], NONE, 2),
    "relu, then bias": (lambda y, b, z: jax.nn.relu(y) + b, NONE, 2),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_is_found_behind_a_convolution(name):
    after, epilogue, passes = BEHIND[name]
    x, w, z = jnp.ones((2, 6, 6, 3)), jnp.ones((3, 3, 3, K)), jnp.ones((2, 6, 6, K))
    fun = lambda x, w, b, z: after(conv(x, w), b, z)
    jaxpr = jax.jit(fun).trace(x, w, jnp.ones(K), z).jaxpr
    [step] = [step for step in capture(jaxpr).program.steps if step.convolution]
    assert step.convolution.epilogue == epilogue
    assert step.epilogue_nbytes == passes * 4 * math.prod(z.shape)
    assert [c.epilogue for c in kernels_of(jaxpr)] == [NONE, *([epilogue] if epilogue else [])]


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("epilogue", [BIAS, BOTH])
@pytest.mark.parametrize("sizes", [(8,), (5, 1, 2)])
def test_it_is_the_parts_one_after_the_other(sizes, epilogue, channels_last):
    c = dataclasses.replace(
        convolution(8), features_in=4, features_out=K, channels_last=channels_last
    ).with_epilogue(epilogue)
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x, w, b = draw(layouts(c)["x"]), draw(layouts(c)["w"]), draw((K,))
    expected = whole(c, x, w) + (b if channels_last else b[:, None, None])
    if epilogue == BOTH:
        expected = jnp.maximum(expected, 0)
    way = Configuration(tuple(Micro(n, 1, (), 0, 1.0) for n in sizes), epilogue)
    y = fused_convolution(c, way, x, w, b)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"operands of .* are of shapes"):
        fused_convolution(c, way, x, w, b[1:])
    short = dataclasses.replace(way, micros=way.micros[1:])
    with pytest.raises(ValueError, match=f"have {short.batch} samples, the batch 8"):
        fused_convolution(c, short, x, w, b)


def step(params, batch):
    def loss_of(params):
        h = batch
        for w, b in params:
            h = jax.nn.relu(conv(h, w) + b)
        return jnp.square(h).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)
    return [(draw(3, 3, 3, 8), draw(8)), (draw(3, 3, 8, 5), draw(5))], draw(8, 10, 10, 3)


def fused_halves(name, program, costs, *rest):
    """Everything in halves, with its epilogue; XLA's own has a workspace that no budget has."""
    found = {}
    for s, x in enumerate(program.steps):
        if x.convolution:
            half = Micro(x.convolution.batch // 2, 1, (), 64, 0.1 * costs.seconds[s])
            own = Micro(x.convolution.batch, XLA, (), 1 << 30, costs.seconds[s])
            way = Configuration((half, half), x.convolution.epilogue)
            found[s] = Configuration((own,)), way
    return found


def test_in_a_plan_it_gives_the_same_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr("vmem_jax.conv.candidates.choices_of", fused_halves)
    args = arguments()
    budgeted = vmem_jax.jit(step, budget="64MiB", allow=("order", "recompute", "workspace"))
    plan = budgeted.plan(*args)
    assert [way.epilogue for _, way in plan.divided].count(BOTH) == 2
    assert "fused_convolution" in str(jax.make_jaxpr(budgeted)(*args))
    expected, got = jax.jit(step)(*args), budgeted(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, expected)
    text = str(budgeted.explain(*args))
    assert sum("bias and relu" in line for line in text.splitlines()) == 2
    plan.save(tmp_path / "plan.json")
    assert vmem_jax.Plan.load(tmp_path / "plan.json") == plan
    program = capture(jax.jit(step).trace(*args).jaxpr).program
    s, way = next((s, way) for s, way in plan.divided if way.epilogue == NONE)
    wrong = dict(plan.convolutions) | {s: dataclasses.replace(way, epilogue=BIAS)}
    broken = dataclasses.replace(plan, convolutions=tuple(sorted(wrong.items())))
    assert "has no bias behind it" in violations(program, broken)[0]


class H200:
    platform, device_kind = "gpu", "NVIDIA H200"


def test_what_is_fused_competes_with_what_is_not(monkeypatch, tmp_path):
    """Alone it is faster here, but leaves a pass over y to be done."""
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(cudnn, "version", lambda: 91900)
    program = capture(jax.jit(step).trace(*arguments()).jaxpr).program
    costs = analytic(program, CARDS["h200"].machine)
    s, c = next((s, x.convolution) for s, x in enumerate(program.steps) if x.convolution)
    besides = program.steps[s].epilogue_nbytes / CARDS["h200"].machine.bandwidth
    alone, fused = c.variants
    micro = lambda engine, workspace, seconds: Entry((Micro(8, engine, (), workspace, seconds),))
    database = Database(identity_of("NVIDIA H200", "91900"))
    database.add({alone: micro(3, 1000, 1.0)})
    for engine, workspace, seconds, wins in (
        (11, 0, 1.0 + 2 * besides, [11, 3]),
        (12, 0, 1.0 + 0.5 * besides, [12]),
    ):
        database.add({fused: micro(engine, workspace, seconds)})
        own, *ways = choices_of("step", program, costs, H200)[s]
        assert own.seconds == 1.0 and [w.micros[0].engine for w in ways] == wins[: len(ways)]
        assert ways[0].epilogue == BOTH
        assert all(w.epilogue == NONE and w.seconds == 1.0 + besides for w in ways[1:])


def best_of_every_mix(micros_of, batch, besides, limit):
    """By trying all: seconds of the fastest micro-batches that make up `batch` within `limit`."""
    every = [(m, variant.epilogue) for variant, each in micros_of.items() for m in each]
    every = [(m, epilogue) for m, epilogue in every if m.workspace <= limit]
    best = math.inf
    for count in range(1, batch + 1):
        for parts in itertools.combinations_with_replacement(every, count):
            if sum(m.batch for m, _ in parts) == batch:
                is_bare = any(not epilogue for _, epilogue in parts)
                best = min(best, sum(m.seconds for m, _ in parts) + besides * is_bare)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_no_mix_of_parts_with_and_without_the_epilogue_beats_the_front(seed):
    rng = random.Random(seed)
    c = convolution(6).with_epilogue(BOTH)
    draw = lambda batch: Micro(batch, 1, (), rng.randrange(6), batch * rng.uniform(0.5, 1.5))
    micros_of = {v: [draw(b) for b in (1, 2, 4, 6) for _ in range(2)] for v in c.variants}
    besides = rng.choice([0.0, 0.3, 3.0])
    found = front_of_variants(c, micros_of, besides)
    for limit in range(6):
        within = [one.seconds for one in found if one.workspace <= limit]
        expected = best_of_every_mix(micros_of, 6, besides, limit)
        assert min(within, default=math.inf) == pytest.approx(expected)
    for one in found:
        assert one.batch == 6 and one.epilogue in (NONE, BOTH)
        assert bool(one.bare_samples) == (one.epilogue == BOTH and any(m.bare for m in one.micros))


MIXED = (Micro(5, 1, (), 0, 1.0), Micro(1, 2, (), 0, 1.0, bare=True), Micro(2, 1, (), 0, 1.0))


def test_a_mix_is_taken_from_the_database_and_keeps_its_form(monkeypatch, tmp_path):
    """4 of 5 samples have a fast kernel with the epilogue, the fifth has one without it."""
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(cudnn, "version", lambda: 91900)
    args = list(arguments())
    args[1] = args[1][:5]
    program = capture(jax.jit(step).trace(*args).jaxpr).program
    costs = analytic(program, CARDS["h200"].machine)
    s, c = next((s, x.convolution) for s, x in enumerate(program.steps) if x.convolution)
    alone, fused = c.variants
    entry = lambda *micros: Entry(tuple(Micro(b, 1, (), w, seconds) for b, w, seconds in micros))
    database = Database(identity_of("NVIDIA H200", "91900"))
    database.add({alone: entry((5, 1000, 1.0)), fused: entry((5, 1000, 1.0))})
    database.add(
        {fused.with_batch(4): entry((4, 10, 0.5)), fused.with_batch(1): entry((1, 0, 9.0))}
    )
    database.add(
        {alone.with_batch(1): entry((1, 10, 0.3)), alone.with_batch(4): entry((4, 10, 0.9))}
    )
    costs = dataclasses.replace(costs, convolutions=choices_of("step", program, costs, H200))
    besides = program.steps[s].epilogue_nbytes / CARDS["h200"].machine.bandwidth
    chosen = dict(UCuDNN("wr", limit=10).plan(program, costs, None).convolutions)[s]
    assert [(m.batch, m.bare) for m in chosen.micros] == [(4, False), (1, True)]
    assert chosen.epilogue == BOTH and chosen.seconds == pytest.approx(0.8 + besides)
    plan = dataclasses.replace(keep_plan(program, None, 0, 0.0), convolutions=((s, chosen),))
    assert vmem_jax.Plan.from_json(plan.to_json()) == plan
    wrong = dataclasses.replace(chosen, epilogue=NONE)
    broken = dataclasses.replace(plan, convolutions=((s, wrong),), fenced=True)
    assert "has bare micro-batches, and its configuration no" in violations(program, broken)[0]


@pytest.mark.parametrize("epilogue", [BIAS, BOTH])
def test_the_samples_without_the_epilogue_get_it_behind_the_call(epilogue, monkeypatch):
    c = dataclasses.replace(convolution(8), features_in=4, features_out=K).with_epilogue(epilogue)
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x, w, b = draw(layouts(c)["x"]), draw(layouts(c)["w"]), draw((K,))
    alone = whole(c, x, w)
    full = with_epilogue(c, alone, b)
    called = jnp.concatenate([full[:5], alone[5:6], full[6:]])  # what the call gives
    seen = {}

    def ffi_call(target, results):
        return lambda *operands, **attributes: (seen.update(attributes), (called, None))[1]

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    monkeypatch.setattr(extension, "load", lambda: type("Built", (), {"CUDNN_BUILT": 91900}))
    mixed = Configuration(MIXED, epilogue)
    got = by_cudnn(x, w, b, convolution=c, configuration=mixed)
    np.testing.assert_array_equal(got, full)
    # samples, engine, channels, whether bare, and no knobs
    assert seen["micros"].tolist() == [5, 1, 0, 0, 0, 1, 2, 0, 1, 0, 2, 1, 0, 0, 0]
    # on a CPU all parts are made, then the epilogue of all
    on_cpu = fused_convolution(c, mixed, x, w, b)
    np.testing.assert_allclose(on_cpu, full, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu_compile
@pytest.mark.skipif(extension.load().CUDNN_BUILT is None, reason="built without cuDNN")
def test_xla_compiles_the_call_with_a_bias_and_puts_no_copy_around_it():
    from vmem_jax.devices.targets import target

    card = target("h200")
    c = dataclasses.replace(convolution(8), features_in=8, features_out=16).with_epilogue(BOTH)
    here = lambda shape: jax.ShapeDtypeStruct(shape, "float32", sharding=card.sharding())
    way = Configuration((Micro(4, 11, (), 100, math.nan), Micro(4, 44, (), 1000, math.nan)), BOTH)
    call = jax.jit(functools.partial(fused_convolution, c, way))
    shapes = layouts(c)
    text = call.lower(here(shapes["x"]), here(shapes["w"]), here((16,))).compile().as_text()
    assert text.count(f'custom_call_target="{TARGET}"') == 1
    assert all(f" {op}(" not in text for op in ("transpose", "copy", "add", "maximum", "fusion"))
