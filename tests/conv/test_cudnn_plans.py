"""cuDNN's plans for GPUs that are not here, and the custom call as far as it goes without one."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from vmem_jax.conv import cudnn
from vmem_jax.conv.call import TARGET, by_cudnn
from vmem_jax.conv.cudnn import Note
from vmem_jax.conv.devices import DEVICES
from vmem_jax.conv.primitive import micro_convolution
from vmem_jax.conv.slices import layouts, roles
from vmem_jax.core.convolution import Configuration, Convolution, Epilogue, Micro, Pass
from vmem_jax.devices.targets import target
from vmem_jax.transfer import extension


def layer(
    channels=(64, 64),
    size=(56, 56),
    kernel=(3, 3),
    strides=None,
    padding=((1, 1), (1, 1)),
    dilation=None,
    groups=1,
    batch=32,
) -> Convolution:
    """The forward pass in float32."""
    ones = (1,) * len(size)
    return Convolution(
        which=Pass.FORWARD,
        dtype="float32",
        strict=False,
        batch=batch,
        features_in=channels[0],
        features_out=channels[1],
        size=size,
        kernel=kernel,
        strides=strides or ones,
        padding=padding,
        dilation=dilation or ones,
        groups=groups,
    )


LAYERS = {
    "3x3": layer(),
    "stem": layer((3, 64), (224, 224), (7, 7), (2, 2), ((3, 3), (3, 3))),
    "1x1": layer((256, 64), kernel=(1, 1), padding=((0, 0), (0, 0))),
    "3d": layer(size=(16, 56, 56), kernel=(3, 3, 3), padding=((1, 1),) * 3, batch=4),
    "1d": layer(size=(100,), kernel=(5,), padding=((2, 2),)),
    "uneven": layer(strides=(2, 2), padding=((0, 1), (0, 1))),  # as "SAME" has it
    "groups": layer(groups=4),
    "depthwise": layer(groups=64),
    "dilated": layer(dilation=(2, 2), padding=((2, 2), (2, 2))),
    "odd": layer((5, 7), (13, 11)),  # samples that begin at no multiple of 16 bytes
    "nchw": dataclasses.replace(layer(), channels_last=False),
}
KINDS = {
    "float32": {},
    "strict": {"strict": True},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "float64": {"dtype": "float64"},
}
built = pytest.mark.skipif(
    extension.load().CUDNN_BUILT is None, reason="the extension was built without cuDNN's headers"
)


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", Pass)
@pytest.mark.parametrize("name", LAYERS)
def test_plans_of_an_h200(name, which, kind):
    convolution = dataclasses.replace(LAYERS[name], which=which, **KINDS[kind])
    plans = cudnn.plans(convolution, "h200")
    assert plans
    assert min(plan.workspace for plan in plans) >= 0
    assert len({(plan.engine, plan.knobs, plan.channels) for plan in plans}) == len(plans)
    assert not any(Note.DOWN_CONVERT_INPUTS in plan.notes for plan in plans)
    if kind == "strict":
        assert not any(plan.tensor_cores for plan in plans)
    elif kind == "float32" and name == "3x3":
        assert plans[0].tensor_cores  # so that the line above means something


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize("which", Pass)
@pytest.mark.parametrize("name", ["3x3", "stem", "dilated", "3d"])
def test_half_of_the_batch_needs_half_of_the_workspace(name, which):
    """Of the same engine with the same knobs; else micro-batches would buy nothing.

    Some engines split a sum that is long for its batch, and take a MiB or two more for that.
    """
    whole = dataclasses.replace(LAYERS[name], which=which)
    half = whole.with_batch(whole.batch // 2)
    find = lambda c: {(p.engine, p.knobs): p.workspace for p in cudnn.plans(c, "h200")}
    larger, smaller = find(whole), find(half)
    both = larger.keys() & smaller.keys()
    assert len(both) >= len(larger) / 3
    assert all(smaller[key] <= larger[key] + 2**22 for key in both)
    large = [key for key in both if larger[key] > 2**25]
    assert large and all(smaller[key] < 0.6 * larger[key] for key in large)


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize("machine", DEVICES)
def test_every_described_device(machine):
    assert cudnn.plans(LAYERS["3x3"], machine)


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("epilogue", [Epilogue.BIAS, Epilogue.BIAS_RELU])
def test_plans_with_an_epilogue(epilogue, strict):
    """There are some, by engines of their own, and none is compiled when it is made."""
    alone = dataclasses.replace(LAYERS["3x3"], strict=strict)
    fused = cudnn.plans(alone.with_epilogue(epilogue), "h200")
    assert fused and not any(plan.compiled for plan in fused)
    assert {p.engine for p in fused} != {p.engine for p in cudnn.plans(alone, "h200")}
    backward = dataclasses.replace(alone, which=Pass.BACKWARD_DATA, epilogue=epilogue)
    with pytest.raises(ValueError, match="only a forward pass has an epilogue"):
        cudnn.plans(backward, "h200")


@pytest.mark.gpu_compile
@built
def test_as_a_library_of_the_profiler():
    library = cudnn.Cudnn("h200")
    plans = library.plans(LAYERS["3x3"])
    assert plans == cudnn.plans(LAYERS["3x3"], "h200")
    assert math.isnan(
        library.seconds(LAYERS["3x3"], plans[0], 1.0)
    )  # there is nothing to time it on


@pytest.mark.gpu_compile
@built
def test_cudnn_and_xlas_compiler_in_one_process():
    """The stand-in for a missing driver must not keep XLA from compiling, nor the reverse."""
    lowered = lambda: jax.jit(jnp.sin).lower(
        jax.ShapeDtypeStruct((8,), "float32", sharding=target("h200").sharding())
    )
    first = cudnn.plans(LAYERS["3x3"], "h200")
    assert lowered().compile() is not None
    assert cudnn.plans(LAYERS["3x3"], "h200") == first


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", Pass)
def test_xla_counts_the_workspace(which, dtype):
    card = target("h200")
    c = dataclasses.replace(LAYERS["3x3"], which=which, dtype=dtype)
    workspace = 1 << 30
    micros = (Micro(24, 0, (), 100, math.nan), Micro(8, 1, ((2, 3),), workspace, math.nan))
    shapes, (first, second, _) = layouts(c), roles(which)
    here = lambda role: jax.ShapeDtypeStruct(shapes[role], dtype, sharding=card.sharding())
    call = jax.jit(lambda a, b: micro_convolution(c, Configuration(micros), a, b))
    compiled = call.lower(here(first), here(second)).compile()
    text = compiled.as_text()
    assert text.count(f'custom_call_target="{TARGET}"') == 1
    assert " transpose(" not in text and " copy(" not in text
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert workspace <= temporaries < workspace + (1 << 20)


@pytest.mark.gpu_compile
@built
@pytest.mark.parametrize("recorded", [True, False])
def test_the_call_may_be_recorded_into_a_cuda_graph(recorded, tmp_path):
    """XLA records what says that it may, on a driver that can; here it has one described."""
    card = target("h200")
    versions = 'gpu_device_info {\n  driver_version: "13.0.0"\n  runtime_version: "13.0.0"'
    card = dataclasses.replace(
        card, description=card.description.replace("gpu_device_info {", versions)
    )
    c, shapes = LAYERS["3x3"], layouts(LAYERS["3x3"])
    here = lambda role: jax.ShapeDtypeStruct(shapes[role], "float32", sharding=card.sharding())
    configuration = Configuration((Micro(32, 0, (), 0, math.nan),))
    step = jax.jit(lambda x, w: jnp.tanh(micro_convolution(c, configuration, jnp.sin(x), w)))
    options = {"xla_gpu_graph_min_graph_size": 1, "xla_dump_to": str(tmp_path)}
    if not recorded:
        options["xla_gpu_enable_command_buffer"] = ""
    step.lower(here("x"), here("w")).compile(compiler_options=options)
    [*_, after] = sorted(tmp_path.glob("*thunk_sequence*"))
    before, graph, inside = after.read_text().partition("kCommandBuffer")
    assert "kCustomCall" in (inside if recorded else before)
    assert bool(graph) == recorded


@built
@pytest.mark.parametrize("which", Pass)
def test_the_call_understands_what_it_is_given(which):
    """On a CPU it gets no stream, and that alone is wrong: everything else was decoded."""
    handlers = extension.load().targets()["CUDA"]["micro_conv"]
    jax.ffi.register_ffi_target("test_micro_conv", handlers["execute"], platform="cpu")
    c = dataclasses.replace(LAYERS["odd"], which=which)
    configuration = Configuration((Micro(30, 1, ((2, 3), (4, 5)), 8, 0.0), Micro(2, 0, (), 0, 0.0)))
    shapes, (first, second, _) = layouts(c), roles(which)
    operands = jnp.zeros(shapes[first]), jnp.zeros(shapes[second])
    with pytest.raises(Exception, match=r"bad operands at: 0\)\s.*\s.*platform stream"):
        jax.jit(
            lambda a, b: by_cudnn(
                a, b, convolution=c, configuration=configuration, target="test_micro_conv"
            )
        )(*operands)


@built
def test_shapes_that_do_not_belong_together_are_refused():
    c, module = LAYERS["3x3"], extension.load()
    *names, last, (x, w, y), window = cudnn._arguments(c)
    wrong = {
        "another size": (x, w, (*y[:-1], y[-1] + 1)),
        "different batches": (x, w, (y[0] - 1, *y[1:])),
        "different output channels": (x, w, (y[0], y[1] * 2, *y[2:])),
        "groups": ((x[0], 48, *x[2:]), w, y),
        "differ in their dimensions": (x, w[:-1], y),
    }
    for why, shapes in wrong.items():
        with pytest.raises(ValueError, match=why):
            module.conv_plans(
                *names, last, shapes, window, device=0, banned=[], compiling=False, channels=0
            )


def test_unknown_targets_say_what_there_is():
    with pytest.raises(ValueError, match=r"'tpu'.*h200.*can"):
        cudnn.plans(LAYERS["3x3"], "tpu")
    with pytest.raises(ValueError, match="NVIDIA GPUs"):
        cudnn.plans(LAYERS["3x3"], jax.devices("cpu")[0])


@pytest.fixture
def afresh():
    """What is looked up once a process is looked up again, before and after."""
    caches = cudnn._open, cudnn._prepare_without_device
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_an_extension_without_cudnn_says_so(afresh, monkeypatch):
    module = extension.load()
    monkeypatch.setattr(module, "CUDNN_BUILT", None)
    with pytest.raises(ImportError, match=r"built without cuDNN.*CUDNN_INCLUDE_DIR"):
        cudnn.plans(LAYERS["3x3"], "h200")
    if module.CUDA_VERSION is not None:
        assert "no convolutions, built without cuDNN" in extension.describe()


@pytest.mark.gpu_compile
@built
def test_missing_libraries_are_named_before_cudnn_ends_the_process(afresh, monkeypatch):
    cudnn._open()
    load = ctypes.CDLL

    def without_cublas(name, *args, **kwargs):
        if "cublasLt" in name:
            raise OSError("no such file")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(ctypes, "CDLL", without_cublas)
    with pytest.raises(ImportError, match=r"libcublasLt.*pip install"):
        cudnn.plans(LAYERS["3x3"], "h200")
