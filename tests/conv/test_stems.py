"""Stems: convolutions of few channels in 16 bits, padded with zeros in the workspace of the call."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vmem_jax.conv import cudnn
from vmem_jax.conv.call import TARGET, attributes
from vmem_jax.conv.compiled import own_convolutions
from vmem_jax.conv.fused import fused_convolution
from vmem_jax.conv.primitive import micro_convolution
from vmem_jax.conv.slices import layouts, roles, whole
from vmem_jax.core.convolution import Configuration, Convolution, Epilogue, Micro, Pass
from vmem_jax.core.plan import Plan, keep_plan
from vmem_jax.core.program import Program
from vmem_jax.devices.targets import target
from vmem_jax.policy.workspace_division import divide, front
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes, reuse
from vmem_jax.report.convolutions import configurations_table
from vmem_jax.transfer import extension

MIB = 2**20
STEM = Convolution(
    which=Pass.FORWARD,
    dtype="bfloat16",
    strict=False,
    batch=256,
    features_in=3,
    features_out=64,
    size=(224, 224),
    kernel=(7, 7),
    strides=(2, 2),
    padding=((3, 3), (3, 3)),
    dilation=(1, 1),
)
SMALL = dataclasses.replace(STEM, batch=6, features_out=4, size=(12, 10))
built = pytest.mark.skipif(
    extension.load().CUDNN_BUILT is None or "compress" not in extension.load().targets()["CUDA"],
    reason="the extension was built without cuDNN's headers, or without nvcc",
)


@pytest.mark.parametrize(
    ("changed", "paddings"),
    [
        ({}, (4, 8)),
        ({"dtype": "float16", "features_in": 1}, (4, 8)),
        ({"features_in": 4}, (8,)),
        ({"features_in": 6}, (8,)),
        ({"features_in": 17}, (20, 24)),
        ({"features_in": 16}, ()),
        ({"dtype": "float32"}, ()),
        ({"channels_last": False}, ()),
        ({"features_in": 6, "features_out": 6, "groups": 3}, ()),
    ],
)
def test_what_is_padded_and_to_how_many_channels(changed, paddings):
    assert dataclasses.replace(STEM, **changed).paddings == paddings


def copies(convolution: Convolution, channels: int) -> int:
    """Bytes of x and w with so many channels, each a multiple of 256."""
    wide = dataclasses.replace(convolution, features_in=channels)
    return sum(-(-2 * math.prod(shape) // 256) * 256 for shape in (wide.x_shape, wide.w_shape))


def ways(convolution: Convolution) -> list[Micro]:
    """Of all sizes of micro-batches: slow without a workspace; fast with copies, as on an H200."""
    found = []
    for batch in batch_sizes(convolution.batch, BatchSizes.POWER_OF_TWO):
        part, launch = convolution.with_batch(batch), 5e-6
        found.append(Micro(batch, 1, (), 256, launch + batch * 8.68e-3 / 256))
        found.append(Micro(batch, 5, (), copies(part, 8) + 1000, launch + batch * 3.14e-3 / 256, 8))
    return found


def test_a_limit_takes_padded_micro_batches():
    """16 samples padded to 8 channels are 12.3 MiB, 32 are 24.5; the whole batch is 196."""
    best = reuse(STEM, ways(STEM), 20 * MIB)
    assert [(m.batch, m.channels) for m in best.micros] == [(16, 8)] * 16
    assert best.workspace <= 20 * MIB and best.seconds < 1.03 * 3.14e-3
    assert reuse(STEM, ways(STEM), MIB // 2).seconds > 8e-3
    assert [m.batch for m in reuse(STEM, ways(STEM)).micros] == [256]
    two = divide([front(ways(STEM), 256)] * 2, 40 * MIB)
    assert {m.channels for way in two for m in way.micros} == {8}
    assert sum(way.workspace for way in two) <= 40 * MIB


def test_channels_are_part_of_what_is_called_saved_and_shown():
    best = reuse(STEM, ways(STEM), 20 * MIB)
    bare = Configuration(tuple(dataclasses.replace(m, channels=0) for m in best.micros))
    assert best.calls != bare.calls
    plan = dataclasses.replace(
        keep_plan(Program((), (), (), ()), None, 0, 0.0), convolutions=((3, best),)
    )
    assert Plan.from_json(plan.to_json()) == plan
    table = configurations_table(STEM, [best, bare])
    assert list(table.columns[1].cells) == ["5 on 8 channels", "5"]
    one = Configuration((Micro(256, 5, ((1, 2),), 9, 1.0, 8),))
    assert attributes(STEM, one, False)["micros"].tolist() == [256, 5, 8, 0, 1, 1, 2]


@pytest.mark.parametrize("which", Pass)
def test_on_a_cpu_it_is_the_convolution_all_the_same(which):
    c = dataclasses.replace(SMALL, which=which)
    rng = np.random.default_rng(0)
    first, second, _ = roles(which)
    draw = lambda shape: jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16)
    lhs, rhs = draw(layouts(c)[first]), draw(layouts(c)[second])
    chosen = Configuration(tuple(Micro(n, 5, (), 9000, 1.0, 8) for n in (3, 1, 2)))
    np.testing.assert_array_equal(micro_convolution(c, chosen, lhs, rhs), whole(c, lhs, rhs))
    if which == Pass.FORWARD:
        c = c.with_epilogue(Epilogue.BIAS_RELU)
        y = fused_convolution(c, chosen, lhs, rhs, jnp.zeros(4, jnp.bfloat16))
        np.testing.assert_array_equal(y, jnp.maximum(whole(c, lhs, rhs), 0))


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize(
    ("which", "epilogue"),
    [*((which, Epilogue.NONE) for which in Pass), (Pass.FORWARD, Epilogue.BIAS_RELU)],
)
def test_padded_plans_of_an_h200(which, epilogue):
    """They are those of the wide convolution, and need the copies besides."""
    c = dataclasses.replace(STEM, which=which, epilogue=epilogue)
    for part in (c, c.with_batch(16)):
        plans = cudnn.plans(part, "h200")
        assert {p.channels for p in plans} == {0, 4, 8}
        assert len({(p.engine, p.knobs, p.channels) for p in plans}) == len(plans)
        for channels in (4, 8):
            padded = [p for p in plans if p.channels == channels]
            wide = cudnn.plans(dataclasses.replace(part, features_in=channels), "h200")
            wide = [p for p in wide if not p.channels]
            assert [(p.engine, p.knobs) for p in padded] == [(p.engine, p.knobs) for p in wide]
            for one, other in zip(padded, wide, strict=True):
                assert one.workspace == other.workspace + copies(part, channels)
            assert any(p.tensor_cores for p in padded)
    least = min(p.workspace for p in plans if p.channels == 8)
    assert least == copies(c.with_batch(16), 8) < 13 * MIB


@built
def test_what_cannot_be_padded_is_refused():
    module = extension.load()
    for changed, why in (
        ({"dtype": "float32"}, "bf16 and f16 alone"),
        ({"channels_last": False}, "last alone"),
        ({"features_in": 6, "groups": 2}, "without groups alone"),
        ({"features_in": 8}, "8 channels, to be padded to 8"),
    ):
        arguments = cudnn._arguments(dataclasses.replace(STEM, **changed))
        with pytest.raises(ValueError, match=why):
            module.conv_plans(*arguments, device=0, banned=[], compiling=False, channels=8)


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.BACKWARD_FILTER])
def test_xla_counts_the_copies(which):
    """Compiled for an H200, a stem in micro-batches needs what its ways say, and no wide copy."""
    card = target("h200")
    c = dataclasses.replace(STEM, which=which)
    plans = cudnn.plans(c.with_batch(16), "h200")
    plan = min((p for p in plans if p.channels == 8), key=lambda p: p.workspace)
    micro = Micro(16, plan.engine, plan.knobs, plan.workspace, math.nan, plan.channels)
    configuration = Configuration((micro,) * 16)
    shapes, (first, second, _) = layouts(c), roles(which)
    here = lambda role: jax.ShapeDtypeStruct(shapes[role], c.dtype, sharding=card.sharding())
    call = jax.jit(lambda a, b: micro_convolution(c, configuration, a, b))
    compiled = call.lower(here(first), here(second)).compile()
    assert compiled.as_text().count(f'custom_call_target="{TARGET}"') == 1
    partials = 16 * 2 * math.prod(c.w_shape) if which == Pass.BACKWARD_FILTER else 0
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert plan.workspace <= temporaries < plan.workspace + partials + MIB
    assert temporaries < 20 * MIB


@pytest.mark.gpu_compile
@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.BACKWARD_FILTER])
def test_what_xla_copies_is_workspace_of_its_own(which):
    """For an H200 that is not there XLA pads stems in float16 to 4 channels, the whole batch."""
    card = target("h200")
    c = dataclasses.replace(STEM, which=which, dtype="float16")
    shapes, (first, second, _) = layouts(c), roles(which)
    here = lambda role: jax.ShapeDtypeStruct(shapes[role], c.dtype, sharding=card.sharding())
    call = jax.jit(functools.partial(whole, c))
    compiled = call.lower(here(first), here(second)).compile()
    own = own_convolutions(compiled.as_text(), [c])[c]
    assert own.channels == 4
    assert abs(own.workspace - compiled.memory_analysis().temp_size_in_bytes) < MIB
