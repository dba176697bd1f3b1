"""Convolutions that normalise their operand and add up their result: values, keys and engines."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolutions import convolution, of_a_residual_network

from vmem_jax.conv import cudnn
from vmem_jax.conv.call import TARGET, all_by_cudnn
from vmem_jax.conv.database import Database, Entry, identity_of
from vmem_jax.conv.prologue import normalising_convolution
from vmem_jax.conv.slices import layouts, roles, whole
from vmem_jax.core.convolution import XLA, Configuration, Epilogue, Micro, Pass
from vmem_jax.devices.targets import target
from vmem_jax.transfer import extension

built = pytest.mark.skipif(
    extension.load().CUDNN_BUILT is None, reason="the extension was built without cuDNN's headers"
)
K = 6
LAYER = dataclasses.replace(
    convolution(8), features_in=4, features_out=K, dtype="float16", strict=False
)
SHAPES = {
    "1×1": ((256, 64), 1, 1),
    "3×3": ((64, 64), 3, 1),
    "3×3, strides": ((128, 128), 3, 2),
    "1×1, strides": ((256, 512), 1, 2),
}


def of(shape, which=Pass.FORWARD, dtype="float16", batch=256):
    """That of a residual network."""
    return of_a_residual_network(*SHAPES[shape], (56, 56), batch, which, dtype)


def drawn(c, seed=0):
    """Operands of `c`, scale and bias last."""
    rng = np.random.default_rng(seed)
    shapes = layouts(c)
    made = [rng.standard_normal(shapes[role]) for role in roles(c.which)[:2]]
    made += [rng.standard_normal(c.features_in) for _ in range(2)]
    return [jnp.asarray(a, c.dtype) for a in made]


def by_xla(*sizes):
    return Configuration(tuple(Micro(n, XLA, (), 0, math.nan) for n in sizes))


def in_float64(c, x, other, scale, bias):
    """The same by NumPy but for the convolution itself, with the prologue rounded as `c` says."""
    spread = (slice(None), *(None,) * len(c.size)) if not c.channels_last else (...,)
    x, scale, bias = (np.asarray(a, np.float64) for a in (x, scale, bias))
    x = np.maximum(x * scale[spread] + bias[spread], 0).astype(c.dtype)
    wide = dataclasses.replace(c, dtype="float32", epilogue=Epilogue.NONE, prologue=False)
    result = whole(wide, jnp.asarray(x, jnp.float32), jnp.asarray(other, jnp.float32))
    result = np.asarray(result, np.float64)
    axes = (0, 1, 2) if c.channels_last else (0, 2, 3)
    return result, result.sum(axes), np.square(result).sum(axes)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("sizes", [(8,), (5, 1, 2)])
@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.BACKWARD_FILTER])
def test_its_values_are_those_of_the_parts(which, sizes, channels_last):
    c = dataclasses.replace(LAYER, which=which, prologue=True, channels_last=channels_last)
    if which == Pass.FORWARD:
        c = c.with_epilogue(Epilogue.SUMS)
    x, other, scale, bias = drawn(c)
    made = normalising_convolution(c, by_xla(*sizes), x, other, scale, bias)
    expected = in_float64(c, x, other, scale, bias)
    assert [a.dtype.name for a in made] == ["float16", "float32", "float32"][: len(made)]
    assert len(made) == (3 if which == Pass.FORWARD else 1)
    for a, b in zip(made, expected, strict=False):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * np.sqrt(np.square(b).mean()))
    assert float(jnp.abs(made[0]).max()) > 1


def test_what_is_padded_is_zero_behind_the_prologue():
    """A bias of one is added to x alone: at an edge less of it is in reach."""
    c = dataclasses.replace(LAYER, prologue=True, epilogue=Epilogue.SUMS)
    shapes = layouts(c)
    x, w = jnp.zeros(shapes["x"], c.dtype), jnp.ones(shapes["w"], c.dtype)
    one = jnp.ones(c.features_in, c.dtype)
    y, *_ = normalising_convolution(c, by_xla(8), x, w, one, one)
    assert float(y[0, 0, 0, 0]) < float(y[0, c.out[0] // 2, c.out[1] // 2, 0])


def test_sums_are_those_of_what_is_stored():
    """2049 is none of float16: of it 2048 is stored."""
    c = dataclasses.replace(
        LAYER, batch=1, size=(1, 1), kernel=(1, 1), padding=((0, 0),) * 2, strides=(1, 1)
    ).with_epilogue(Epilogue.SUMS)
    x = jnp.asarray([2048, 1, 0, 0], c.dtype).reshape(layouts(c)["x"])
    y, sums, squares = normalising_convolution(c, by_xla(1), x, jnp.ones(layouts(c)["w"], c.dtype))
    np.testing.assert_array_equal(y.ravel(), 2048)
    np.testing.assert_array_equal(sums, 2048)
    np.testing.assert_array_equal(squares, 2048**2)


def test_what_it_is_not():
    x, w, scale, bias = drawn(LAYER)
    with_sums = LAYER.with_epilogue(Epilogue.SUMS)
    with pytest.raises(ValueError, match=r"operands of .* are of shapes"):
        normalising_convolution(LAYER, by_xla(8), x, w)
    with pytest.raises(ValueError, match=r"operands of .*then sums are of shapes"):
        normalising_convolution(with_sums, by_xla(8), x, w, scale, bias)
    with pytest.raises(ValueError, match="have 7 samples, the batch 8"):
        normalising_convolution(with_sums, by_xla(7), x, w)
    with pytest.raises(ValueError, match="does not read x"):
        dataclasses.replace(LAYER, which=Pass.BACKWARD_DATA, prologue=True)


def test_a_prologue_is_part_of_the_key_and_old_keys_are_read(tmp_path):
    database = Database(identity_of("NVIDIA H200", "9.19.0"), tmp_path)
    plain = dataclasses.replace(LAYER, prologue=False)
    ahead = dataclasses.replace(LAYER, prologue=True)
    for n, key in enumerate((plain, ahead)):
        database.add({key: Entry((Micro(key.batch, n, (), n, 1.0),))})
    assert [database.load()[key].micros[0].engine for key in (plain, ahead)] == [0, 1]
    written = [e["convolution"] for e in json.loads(database.path.read_text())["convolutions"]]
    assert sorted("prologue" in fields for fields in written) == [False, True]
    assert "behind scale, bias and relu" in str(ahead) and "behind" not in str(plain)


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.BACKWARD_FILTER])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_h200_has_engines_in_float16_alone(shape, which):
    found = cudnn.plans(of(shape, which), "h200")
    assert found and not any(plan.compiled for plan in found)
    assert max(plan.workspace for plan in found) < 64 << 20
    assert not cudnn.plans(of(shape, which, "bfloat16"), "h200")
    assert not cudnn.plans(of(shape, which, "float32"), "h200")


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.BACKWARD_FILTER])
def test_xla_counts_the_workspace_of_its_call(which):
    card = target("h200")
    c = of("3×3", which, batch=32)
    workspace = 1 << 30
    configuration = Configuration((Micro(32, 2, (), workspace, math.nan),))
    shapes = layouts(c)
    wanted = [shapes[role] for role in roles(which)[:2]] + [(c.features_in,)] * 2
    operands = [jax.ShapeDtypeStruct(s, c.dtype, sharding=card.sharding()) for s in wanted]
    call = jax.jit(lambda *a: normalising_convolution(c, configuration, *a))
    compiled = call.lower(*operands).compile()
    text = compiled.as_text()
    assert text.count(f'custom_call_target="{TARGET}"') == 1
    assert " transpose(" not in text and " convolution(" not in text
    assert workspace <= compiled.memory_analysis().temp_size_in_bytes < workspace + (1 << 20)


@built
@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.BACKWARD_FILTER])
def test_the_call_understands_what_it_is_given(which):
    """On a CPU it gets no stream, and that alone is wrong: everything else was decoded."""
    handlers = extension.load().targets()["CUDA"]["micro_conv"]
    jax.ffi.register_ffi_target("test_prologue", handlers["execute"], platform="cpu")
    c = dataclasses.replace(LAYER, which=which, prologue=True)
    if which == Pass.FORWARD:
        c = c.with_epilogue(Epilogue.SUMS)
    configuration = Configuration((Micro(6, 1, ((2, 3),), 8, 0.0), Micro(2, 0, (), 0, 0.0)))
    call = lambda *a: all_by_cudnn(
        *a, convolution=c, configuration=configuration, target="test_prologue"
    )
    with pytest.raises(Exception, match=r"bad operands at: 0\)\s.*\s.*platform stream"):
        jax.block_until_ready(jax.jit(call)(*drawn(c)))
