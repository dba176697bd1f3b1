"""The networks of benchmarks/training_steps.py, and what is picked by hand for their layers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import training_steps
from step_models import BATCHES, MODELS
from vision_models import ConvNeXt, UNet

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.loop_pairs import find_pairs
from vmem_jax.models.decoder import Decoder, adapters, train_step

ROOT = Path(__file__).parent.parent

WIDTHS = {"decoder": 256, "lora": 256, "vit": 128, "vit_dropout": 128, "gpt": 128, "resnet": 8}
"""Of the networks that have loops."""

DECODER = {"vocabulary": 64, "tokens": 64, "attention": "xla"}
SMALLER = {
    "decoder": DECODER,
    "lora": DECODER,
    "gpt": {"vocabulary": 64, "tokens": 64},
}
HANDS = ("plain", "checkpoint", "every_dot")


def traced(name: str, hand: str, **options) -> jax.extend.core.ClosedJaxpr:
    training = MODELS[name](hand, 2, **options)
    state = jax.eval_shape(training.init, jax.random.key(0))
    batch = jax.eval_shape(training.batch, jax.random.key(1))
    closed = jax.make_jaxpr(training.step)(state, batch)
    same = [(a.shape, a.dtype) for a in jax.tree.leaves(state)]
    assert [(a.shape, a.dtype) for a in closed.out_avals[:-1]] == same
    return flatten(closed)


def residual_nbytes(name: str, hand: str, layers: int = 3) -> int:
    """What the loops of a step stack between them as they are traced."""
    options = {"width": WIDTHS[name], "layers": layers, **SMALLER.get(name, {})}
    flat = traced(name, hand, **options)
    assert len([e for e in compat.open_jaxpr(flat).eqns if e.primitive.name == "scan"]) >= 2
    return sum(pair.residual_nbytes for pair in find_pairs(flat))


@pytest.mark.parametrize("name", [*WIDTHS])
def test_what_is_picked_by_hand_keeps_less(name):
    kept = {hand: residual_nbytes(name, hand) for hand in HANDS}
    assert 0 < kept["checkpoint"] < kept["plain"]
    assert kept["checkpoint"] < kept["every_dot"] <= kept["plain"]


@pytest.mark.parametrize("name", ["decoder", "gpt", "vit"])
def test_segments_keep_what_enters_them_alone(name):
    of_layers, of_segments = (residual_nbytes(name, hand, 9) for hand in ("checkpoint", "sqrt"))
    assert of_segments == pytest.approx(of_layers / 3, rel=0.05)


def test_adapters_learn_beside_frozen_weights():
    training = MODELS["lora"]("checkpoint", 2, width=256, layers=2, **DECODER)
    step = jax.jit(training.step)
    begun, batch = training.init(jax.random.key(0)), training.batch(jax.random.key(1))
    state, losses = begun, []
    for _ in range(20):
        state, loss = step(state, batch)
        losses.append(loss)
    assert losses[-1] < losses[0] - 1e-3
    for new, old in zip(jax.tree.leaves(state[0]), jax.tree.leaves(begun[0]), strict=True):
        np.testing.assert_array_equal(new, old)


def test_frozen_weights_have_no_residuals_where_an_optimiser_throws_their_gradients_away():
    """As where the loss is differentiated by the adapters alone, by which the network is written."""
    model = Decoder(2, 256, 512, 4, 1, 64)
    optimiser = optax.partition(
        {True: optax.adamw(1e-4), False: optax.set_to_zero()},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: any(getattr(key, "key", "") == "adapters" for key in path), params
        ),
    )

    def init(key):
        params = model.init(key)
        params["layers"]["adapters"] = adapters(params["layers"], 4, key)
        return params, optimiser.init(params)

    state = jax.eval_shape(init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 65), jnp.int32)
    [masked] = find_pairs(flatten(jax.make_jaxpr(train_step(model, optimiser))(state, tokens)))

    def loss(trained, params):
        layers = {**params["layers"], "adapters": trained}
        return model.loss({**params, "layers": layers}, tokens=jnp.zeros((2, 65), jnp.int32))

    own = state[0]["layers"]["adapters"]
    [alone] = find_pairs(flatten(jax.make_jaxpr(jax.grad(loss))(own, state[0])))
    assert masked.residual_nbytes == alone.residual_nbytes
    assert len(masked.backward_made.stacked) == len(jax.tree.leaves(own))


def test_segments_compute_what_layers_do():
    options = {"width": 128, "layers": 4, **SMALLER["gpt"]}
    results = []
    for hand in ("plain", "sqrt"):
        training = MODELS["gpt"](hand, 2, **options)
        state, batch = training.init(jax.random.key(0)), training.batch(jax.random.key(1))
        results.append(jax.jit(training.step)(state, batch))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize(
    "name, options", [("vit", {"scanned": False}), ("decoder", {"scanned": False})]
)
def test_segments_are_of_scanned_layers(name, options):
    with pytest.raises(ValueError, match="unrolled"):
        MODELS[name]("sqrt", 2, **options)


def test_layers_are_unrolled_on_demand():
    flat = traced("vit_dropout", "plain", width=128, layers=2, scanned=False)
    assert not find_pairs(flat)


@pytest.mark.parametrize("hand", HANDS[:2])
@pytest.mark.parametrize(
    "name, options",
    [("convnext", {"width": 32, "depths": (1, 1)}), ("unet", {"width": 64, "multiples": (1, 2)})],
)
def test_networks_of_convolutions_are_trained(name, options, hand):
    traced(name, hand, **options)


def test_layers_of_flax_are_checkpointed_on_demand():
    """One `remat2` a layer, which computes its forward pass again, and draws what it drops again."""
    remats = []
    for hand in ("plain", "checkpoint"):
        training = MODELS["vit_flax"](hand, 2, layers=2, width=64)
        state = jax.eval_shape(training.init, jax.random.key(0))
        batch = jax.eval_shape(training.batch, jax.random.key(1))
        remats.append(str(jax.make_jaxpr(training.step)(state, batch)).count(" = remat2["))
    assert remats == [0, 2]


def test_all_networks_have_a_batch():
    assert set(BATCHES) == set(MODELS)


def test_the_networks_of_convolutions_compute_what_depends_on_their_inputs():
    unet, convnext = UNet(64, (1, 2), 1), ConvNeXt((1, 1), 32, 10)
    x = jax.random.normal(jax.random.key(0), (2, 32, 32, 4), jnp.bfloat16)
    t = jnp.array([0.1, 0.9])
    params = unet.init(jax.random.key(1))
    found = unet(params, x, t)
    assert found.shape == x.shape and np.isfinite(found.astype(jnp.float32)).all()
    assert not np.array_equal(found, unet(params, x, t[::-1]))
    y = convnext(convnext.init(jax.random.key(2)), x[..., :3])
    assert y.shape == (2, 10) and not np.array_equal(y[0], y[1])


@pytest.mark.parametrize(
    "way, policy, budget, parts",
    [
        ("0.5", None, "0.5", None),
        ("29.4GiB", None, "29.4GiB", None),
        ("@dots", None, "@dots", None),
        ("exact*4", "exact", None, "4"),
        ("recompute@0.33*2", "recompute", "0.33", "2"),
        ("auto@@every_dot", "auto", "@every_dot", None),
    ],
)
def test_ways_are_read(way, policy, budget, parts):
    found = training_steps.WAY.fullmatch(way)
    assert (found["policy"], found["budget"], found["parts"]) == (policy, budget, parts)


@pytest.mark.parametrize("way", ["0,5", "Dots", "0.5*", "12GB"])
def test_other_ways_are_refused(way):
    assert training_steps.WAY.fullmatch(way) is None


def test_the_lowest_peak_is_a_row_beside_what_is_picked_by_hand(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "benchmarks/training_steps.py", f"--out={out}", "--rounds=0"]
    sizes = "--layers=4 --width=256 --tokens=64 --batch=2 --attention=xla".split()
    subprocess.run([*command, *sizes, "--ways=sqrt,lowest"], cwd=ROOT, check=True)
    segments, lowest = [json.loads(line) for line in out.read_text().splitlines()]
    assert 0 < lowest["gib"] <= segments["gib"] and lowest["predicted_ms"] > 0


@pytest.mark.parametrize(("rounds", "is_timed"), [(3, True), (2, False)])
def test_a_process_that_is_ended_keeps_ways_of_three_blocks(monkeypatch, rounds, is_timed):
    calls = itertools.count()

    def step(state, data):
        if next(calls) == 2 * 2 * rounds:  # two ways, of which a block is two steps
            raise SystemExit
        return state, data

    flags = types.SimpleNamespace(rounds=5, steps=1, traces="")
    monkeypatch.setattr(training_steps, "FLAGS", flags)
    rows = {"plain": {}, "0.5": {}}
    with pytest.raises(SystemExit):
        training_steps._time(lambda: 0.0, 0.0, 1.0, dict.fromkeys(rows, step), rows)
    assert all(("ms" in row) == ("of_plain" in row) == is_timed for row in rows.values())


@pytest.mark.parametrize(
    ("name", "width", "loss"),
    [
        ("bert", 64, np.log(30_522)),
        ("dit", 64, 3.0),
        ("t5", 64, np.log(32_128)),
        ("wavenet", 8, np.log(256)),
    ],
)
def test_networks_that_nothing_was_fitted_to_learn(name, width, loss):
    """The first loss is that of a guess, and the second another. DiT's guess varies by 1 itself."""
    training = MODELS[name]("plain", 2, layers=2, width=width)
    state, batch = training.init(jax.random.key(0)), training.batch(jax.random.key(1))
    step = jax.jit(training.step)
    state, first = step(state, batch)
    assert float(first) == pytest.approx(loss, rel=0.3)
    assert float(step(state, batch)[1]) != float(first)
    by_hand = MODELS[name]("checkpoint", 2, layers=2, width=width)
    marked = lambda training: str(jax.make_jaxpr(training.step)(state, batch)).count("remat")
    assert marked(by_hand) > marked(training) == 0
