"""The layers of a Program: of small networks drawn by hand, and of captured training steps."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers import SHAPES, programs
from hypothesis import given, settings
from networks import ACT, CONV, FC, FORK, POOL, Spec, network

from vmem_jax.capture import capture
from vmem_jax.core.layers import LayerKind, layers
from vmem_jax.core.program import Phase
from vmem_jax.models.vgg import VGG


@pytest.mark.parametrize(
    "specs",
    [
        [CONV, POOL, CONV, FC],
        [CONV, ACT, CONV, ACT, POOL, FC],
        [Spec("conv", 8, reads="xy")] * 3,
        [CONV, Spec("act", 8, reads="y"), CONV, Spec("act", 8, reads="y"), FC],
        [Spec("conv", 8, reads=""), POOL],
    ],
)
def test_every_layer_of_a_chain_has_its_own_steps(specs):
    net = network(specs)
    found = layers(net.program)
    assert [n.forward for n in found] == [(s,) for s in net.forward]
    names = {"conv": "convolution", "pool": "pooling", "act": "activation", "fc": "fully connected"}
    assert [n.kind.value for n in found] == [names[s.kind] for s in specs]
    for n, layer in enumerate(found):
        assert layer.inputs == ((net.y[n - 1] if n else net.batch),)
        assert layer.outputs == (() if n == len(specs) - 1 else (net.y[n],))
        assert net.backward[n] in layer.backward or not specs[n].reads


def test_forks_and_joins_by_reference_count():
    """vDNN, Figure 3: layer 1's output is given up by layer 3, the last that reads it."""
    found = layers(FORK.program)
    for n in range(4):  # the sum of both gradients of layer 1's output is what layer 2 does last
        assert FORK.backward[n] in found[n].backward
    assert found[1].saved == () and found[2].saved == (FORK.y[0],)
    assert found[4].inputs == (FORK.y[1], FORK.y[3])
    assert set(found[4].saved) >= {FORK.y[1], FORK.y[3]}


@pytest.mark.parametrize("program", SHAPES.values(), ids=SHAPES)
def test_shapes(program):
    check(program)


@settings(max_examples=50, deadline=None)
@given(programs())
def test_random_programs(program):
    check(program)


def check(program):
    """Every forward step is in one layer, every backward step at most in one."""
    found = layers(program)
    of_phase = lambda phase: [s for s, step in enumerate(program.steps) if step.phase is phase]
    assert sorted(s for n in found for s in n.forward) == of_phase(Phase.FORWARD)
    assert sorted(s for n in found for s in n.backward) == of_phase(Phase.BACKWARD)
    saved = [b for n in found for b in n.saved]
    assert len(saved) == len(set(saved))
    assert not any(program.is_resident[b] for b in saved)


class Mixed(nn.Module):
    """One layer of every kind."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.gelu(nn.Conv(8, (3, 3))(x))
        x = nn.relu(nn.Dense(32)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=False)(x))


def captured(model, shape):
    x = jnp.zeros(shape)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(model.init, keys, x)

    def step(variables, x, labels, key):
        params = variables["params"]

        def loss_of(params):
            rngs = {"dropout": key}
            rest = {"params": params, "batch_stats": variables.get("batch_stats", {})}
            logits, _ = model.apply(rest, x, rngs=rngs, mutable=["batch_stats"])
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))

    labels = jnp.zeros(shape[0], jnp.int32)
    args = (variables, x, labels, jax.random.key(2))
    return capture(jax.jit(step).trace(*args).jaxpr).program


def test_layers_of_a_captured_vgg():
    program = captured(VGG(((8, 2), (16, 2)), 10, head_width=32), (4, 16, 16, 3))
    found = layers(program)
    check(program)
    kinds = "conv conv pool conv conv pool fully fully fully softmax"
    assert [n.kind.value[: len(k)] for n, k in zip(found, kinds.split(), strict=True)] == (
        kinds.split()
    )
    assert [n.name.split("/")[1] for n in found if n.kind is LayerKind.CONVOLUTION] == [
        "stage1_layer1", "stage1_layer2", "stage2_layer1", "stage2_layer2"
    ]  # fmt: skip
    for n, layer in enumerate(found):
        assert layer.backward, layer.name
        if layer.kind is LayerKind.CONVOLUTION and n:
            assert layer.saved == layer.inputs == found[n - 1].outputs
            gradients = {program.steps[s].op for s in layer.backward}
            assert "conv_general_dilated" in gradients
        if layer.kind is LayerKind.POOLING:  # its index and mask take the place of its input
            assert layer.saved and not set(layer.inputs) & set(layer.saved)


def test_layers_of_every_kind():
    found = layers(captured(Mixed(), (4, 16, 16, 3)))
    kinds = [n.kind for n in found]
    expected = "convolution normalisation convolution normalisation pooling convolution activation"
    expected += ",fully connected,dropout,fully connected,softmax"
    first, *rest = expected.split(",")
    assert [k.value for k in kinds] == [*first.split(), *rest]
    assert all(n.backward for n in found)
