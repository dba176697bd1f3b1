"""What XLA's own convolutions take, as read from a compiled step."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from vmem_jax.capture import capture
from vmem_jax.conv import cudnn
from vmem_jax.conv.candidates import _after_own, learner
from vmem_jax.conv.compiled import Own, own_convolutions
from vmem_jax.conv.database import Database, Entry, identity_of
from vmem_jax.conv.layers import convolutions_of
from vmem_jax.core.cards import machine_for
from vmem_jax.core.convolution import Configuration, Convolution, Micro, Pass
from vmem_jax.core.costs import Source, analytic

LAYER = Convolution(
    which=Pass.FORWARD,
    dtype="float32",
    strict=True,
    batch=8,
    features_in=3,
    features_out=64,
    size=(32, 32),
    kernel=(3, 3),
    strides=(1, 1),
    padding=((1, 1), (1, 1)),
    dilation=(1, 1),
)
# As XLA writes them; operands are defined elsewhere, results are tuples with the workspace.
TEXT = """
  %x = f32[8,32,32,{c}]{{3,2,1,0}} parameter(0)
  w.1 = f32[{k},3,3,{c}]{{3,2,1,0}} transpose(%kernel), dimensions={{3,0,1,2}}
  %dy.2 = f32[8,32,32,{k}]{{3,2,1,0}} get-tuple-element(%other), index=0
  %b = f32[64]{{0}} parameter(1)
  %conv.1 = (f32[8,32,32,{k}]{{3,2,1,0}}, u8[1000]{{0}}) custom-call(%x, w.1, %b), CUDNN$convBias:9
  %conv.2 = (f32[8,32,32,{k}]{{3,2,1,0}}, u8[3000]{{0}}) custom-call(%x, w.1, %b), CUDNN$convBias:9
  ROOT %dw = (f32[{k},3,3,{c}]{{3,2,1,0}}, u8[20]{{0}}) custom-call(%x, %dy.2), CUDNN$convFilter:7
  %gemm = (f32[8,32,32,{k}]{{3,2,1,0}}, u8[77]{{0}}) custom-call(%x, w.1), target="__cublas$gemm"
"""
TEXT = TEXT.replace("CUDNN", 'window={{size=3x3 pad=1_1x1_1}}, custom_call_target="__cudnn')
TEXT = re.sub(r":(\d)\n", r'", backend_config={{"algorithm":{{"algo_id":"\1"}}}}\n', TEXT)


@pytest.mark.parametrize(("c", "k"), [(3, 64), (4, 64), (8, 64)], ids=["plain", "4", "8"])
def test_the_most_of_the_calls_with_the_sizes_of_a_convolution(c, k):
    """Of a call with more channels what it is copied to is part of the workspace."""
    filters = dataclasses.replace(LAYER, which=Pass.BACKWARD_FILTER)
    other = dataclasses.replace(LAYER, features_out=65)
    found = own_convolutions(TEXT.format(c=c, k=k), [LAYER, filters, other])
    channels = c if c > 3 else 0
    copies = 4 * channels * (8 * 32 * 32 + 64 * 3 * 3)
    assert found == {
        LAYER: Own(3000 + copies, 9, True, channels),
        filters: Own(20 + copies, 7, False, channels),
    }


def conv(x, w, strides=1, padding="SAME"):
    spec = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (strides,) * 2, padding, dimension_numbers=spec)


def layers(params, x):
    for strides, w in zip((2, 1, 2), params, strict=True):
        x = jax.nn.relu(conv(x, w, strides) + 1)
    return (x**2).sum()


@pytest.mark.gpu_compile
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["highest", "default"])
def test_every_convolution_is_found_in_what_xla_compiles(dtype, precision):
    """Padding that is uneven, channels that are padded, biases that are fused: all are found."""
    from vmem_jax.devices.targets import target

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    params = [shape(7, 7, 3, 32), shape(3, 3, 32, 64), shape(3, 3, 64, 64)]
    step = jax.jit(jax.grad(layers))
    with jax.default_matmul_precision(precision):
        convolutions = set(convolutions_of(step.trace(params, shape(8, 33, 32, 3)).jaxpr))
        leaves, tree = jax.tree.flatten((params, shape(8, 33, 32, 3)))
        shardings = target("h200").shardings([None] * len(leaves))
        described = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
            for a, s in zip(leaves, shardings, strict=True)
        ]
        text = step.lower(*jax.tree.unflatten(tree, described)).compile().as_text()
    assert len(convolutions) == 3 + 3 + 2
    assert own_convolutions(text, convolutions).keys() == convolutions


@dataclasses.dataclass
class Compiled:
    text: str = TEXT.format(c=3, k=64)

    def as_text(self):
        return self.text


class H200:
    platform, device_kind = "gpu", "NVIDIA H200"


def test_what_is_learned_takes_the_place_of_what_was_thought(monkeypatch, tmp_path):
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(cudnn, "version", lambda: 91900)
    x, w = jnp.zeros((8, 32, 32, 3)), jnp.zeros((3, 3, 3, 64))
    with jax.default_matmul_precision("highest"):
        program = capture(jax.jit(conv).trace(x, w).jaxpr).program
    [s] = [s for s, step in enumerate(program.steps) if step.convolution]
    costs = analytic(program, machine_for("NVIDIA H200"))
    learn = lambda costs: learner(program, H200, None, None)(costs, Compiled()).convolutions[s]
    [own] = learn(costs)
    assert own.is_xlas and (own.workspace, own.seconds) == (3000, costs.seconds[s])
    ways = [
        Configuration((Micro(8, engine, (), workspace, seconds),))
        for engine, workspace, seconds in ((-1, 9000, 1.0), (1, 2000, 2.0), (2, 4000, 3.0))
    ]
    costs = dataclasses.replace(costs, convolutions={s: tuple(ways)})
    own, *others = learn(costs)
    assert own.is_xlas and (own.workspace, own.seconds) == (3000, 1.0)
    assert others == ways[1:2]  # the other is worse in both
    # what was timed tells how long XLA's takes: as long as what needs no more than it does
    timed = Entry(tuple(Micro(8, e, (), w, t) for e, w, t in ((5, 2999, 1.5), (6, 3001, 0.5))))
    Database(identity_of("NVIDIA H200", "91900")).add({LAYER: timed})
    own, *_ = learn(costs)
    assert (own.workspace, own.seconds) == (3000, 1.5)
    slower = dataclasses.replace(costs, convolutions={s: (ways[0].longer(1.0), *ways[1:])})
    assert learn(slower)[0].seconds == 2.0  # by what of the whole batch is known of XLA's own
    # the one that XLA chose, where it is among them, of those that have the epilogue or have not
    same = Entry((Micro(8, 9, (), 3000, 1.7), Micro(8, 8, (), 3000, 1.6)))
    Database(identity_of("NVIDIA H200", "91900")).add({LAYER: same})
    text = TEXT.replace("convBias", "convForward").format(c=3, k=64).replace("u8[1000]", "u8[3000]")
    found = learner(program, H200, None, None)(costs, Compiled(text)).convolutions[s]
    assert found[0].seconds == 1.7
    # with more channels: only a way that adds as many is the same
    padded = TEXT.replace("convBias", "convForward").format(c=8, k=64)
    workspace = 3000 + 4 * 8 * (8 * 32 * 32 + 64 * 3 * 3)
    both = Entry((Micro(8, 9, (), workspace, 1.1), Micro(8, 9, (), workspace, 1.9, 8)))
    Database(identity_of("NVIDIA H200", "91900")).add({LAYER: both})
    own, *_ = learner(program, H200, None, None)(costs, Compiled(padded)).convolutions[s]
    assert (own.workspace, own.seconds) == (workspace, 1.9)
    measured = dataclasses.replace(costs, sources=(Source.MEASURED,) * len(costs.seconds))
    own, *_ = learn(measured)
    assert (own.workspace, own.seconds) == (3000, 1.0)


@pytest.mark.parametrize(
    ("workspace", "seconds", "expected"),
    [
        (4000, 0.95, None),  # chance, and no less workspace than XLA's
        (4000, 0.85, 0.85),
        (2000, 0.95, 1.0),  # as fast, with less workspace
        (2000, 1.5, 1.5),
    ],
)
def test_what_is_faster_by_chance_is_as_fast_as_xlas_own(workspace, seconds, expected):
    way = Configuration((Micro(4, 1, (), workspace, seconds / 2),) * 2)
    own, *others = _after_own(LAYER, 3000, 1.0, [way])
    assert own.is_xlas and own.seconds == 1.0
    assert [w.seconds for w in others] == ([] if expected is None else [pytest.approx(expected)])
    assert all(w.workspace == workspace and w.batch == 8 for w in others)
