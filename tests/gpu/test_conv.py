"""The convolution call on a GPU against XLA's own convolutions. `pytest -m gpu`."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vmem_jax import PlanError
from vmem_jax.conv import cudnn
from vmem_jax.conv.fused import fused_convolution
from vmem_jax.conv.primitive import micro_convolution
from vmem_jax.conv.scratch import Scratch
from vmem_jax.conv.slices import layouts, roles, whole
from vmem_jax.conv.verify import try_configurations
from vmem_jax.core.convolution import Configuration, Convolution, Epilogue, Micro, Pass

pytestmark = pytest.mark.gpu

BATCH = 12
LAYERS = {
    "3x3": {"features_in": 32, "features_out": 64, "size": (14, 13), "kernel": (3, 3)},
    "stem": {"features_in": 3, "features_out": 64, "size": (35, 33), "kernel": (7, 7)},
    "odd": {"features_in": 5, "features_out": 7, "size": (13, 11), "kernel": (3, 3)},
    "uneven": {"features_in": 16, "features_out": 32, "size": (14, 16), "kernel": (3, 3)},
    "groups": {"features_in": 32, "features_out": 64, "size": (9, 8), "kernel": (3, 3)},
    "dilated": {"features_in": 16, "features_out": 32, "size": (15, 16), "kernel": (3, 3)},
    "1d": {"features_in": 16, "features_out": 32, "size": (40,), "kernel": (5,)},
    "3d": {"features_in": 16, "features_out": 32, "size": (6, 7, 8), "kernel": (3, 3, 3)},
}
MORE = {
    "stem": {"strides": (2, 2)},
    "uneven": {"strides": (2, 2), "padding": ((0, 1), (0, 1))},  # as "SAME" has it
    "groups": {"groups": 4, "channels_last": False},
    "dilated": {"dilation": (2, 2)},
}
TOLERANCE = {"float64": 1e-12, "float32": 2e-2, "bfloat16": 3e-2, "float16": 5e-3}
STRICT = 1e-4  # FFT and Winograd round more than sums do, tensor cores in TF32 more than either


def layer(name: str, which: Pass, kind: str) -> Convolution:
    sizes = LAYERS[name]
    ones = (1,) * len(sizes["size"])
    dilation = MORE.get(name, {}).get("dilation", ones)
    padding = tuple((d * (k // 2),) * 2 for k, d in zip(sizes["kernel"], dilation, strict=True))
    return Convolution(
        which=which,
        dtype="float32" if kind == "strict" else kind,
        strict=kind == "strict",
        batch=BATCH,
        **{"strides": ones, "padding": padding, "dilation": ones, **sizes, **MORE.get(name, {})},
    )


def operands(convolution: Convolution, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """At random, in float64, rounded to the dtype of the convolution."""
    rng = np.random.default_rng(seed)
    shapes = layouts(convolution)
    draw = lambda role: rng.standard_normal(shapes[role]).astype(jnp.dtype(convolution.dtype))
    first, second, _ = roles(convolution.which)
    return draw(first), draw(second)


def reference(convolution: Convolution, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """By XLA on the CPU, in float64."""
    double = dataclasses.replace(convolution, dtype="float64", strict=False)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(jax.jit(functools.partial(whole, double))(*map(np.float64, (lhs, rhs))))


@functools.cache
def plans_of(convolution: Convolution, device) -> tuple[cudnn.Plan, ...]:
    return cudnn.plans(convolution, device)


def micro_of(batch: int, plan: cudnn.Plan) -> Micro:
    return Micro(batch, plan.engine, plan.knobs, plan.workspace, math.nan, plan.channels)


def configuration(
    convolution: Convolution, batches, device, which: int = 0, channels: int | None = None
) -> Configuration:
    """Micro-batches of these sizes by the plan at `which`, or the last one, of each size.

    Args:
      channels: only plans that pad to so many.
    """
    micros = []
    for batch in batches:
        plans = plans_of(convolution.with_batch(batch), device)
        plans = [p for p in plans if channels in (None, p.channels)]
        micros.append(micro_of(batch, plans[min(which, len(plans) - 1)]))
    return Configuration(tuple(micros))


def error(result, expected: np.ndarray) -> float:
    """Largest difference, in units of the largest value."""
    assert result.shape == expected.shape
    return float(np.abs(np.float64(result) - expected).max() / np.abs(expected).max())


def run(convolution, chosen, lhs, rhs, device, **options):
    call = lambda a, b: micro_convolution(convolution, chosen, a, b)
    with jax.enable_x64(convolution.dtype == "float64"):
        lhs, rhs = jax.device_put((lhs, rhs), device)
        return jax.jit(call, **options)(lhs, rhs)


@pytest.mark.parametrize("kind", ["float32", "strict", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("which", Pass)
@pytest.mark.parametrize("name", LAYERS)
def test_micro_batches_are_the_convolution(name, which, kind, device):
    convolution = layer(name, which, kind)
    lhs, rhs = operands(convolution)
    expected = reference(convolution, lhs, rhs)
    allowed = STRICT if kind == "strict" else TOLERANCE[convolution.dtype]
    for batches in ((BATCH,), (5, 1, 6)):
        chosen = configuration(convolution, batches, device)
        result = run(convolution, chosen, lhs, rhs, device)
        assert error(result, expected) < allowed, batches


@pytest.mark.parametrize("which", Pass)
@pytest.mark.parametrize("name", ["3x3", "groups", "uneven", "stem"])
def test_every_plan(name, which, device):
    """In strict float32 all plans do the same, adding up gradients to w included, but for those that
    are refused when they are timed. cuDNN 9.19 has such for unequal padding."""
    convolution = layer(name, which, "strict")
    lhs, rhs = operands(convolution)
    expected = reference(convolution, lhs, rhs)
    part, scratch = convolution.with_batch(6), Scratch(device)
    mistaken, right = [], 0
    for i, plan in enumerate(cudnn.plans(part, device)):
        chosen = configuration(convolution, (6, 6), device, i)
        try:
            off = error(run(convolution, chosen, lhs, rhs, device), expected)
        except jax.errors.JaxRuntimeError:
            off = math.inf
        try:
            cudnn.seconds(part, plan, device, scratch=scratch)
            refused = ""
        except RuntimeError as why:
            refused = str(why)
            with pytest.raises(RuntimeError):
                cudnn.check(part, micro_of(6, plan), device, scratch)
        if (off < 10 * STRICT) != (not refused):  # NaN is wrong, too
            mistaken.append((plan, off, refused))
        right += not refused
    assert not mistaken
    assert right


@pytest.mark.parametrize("kind", ["float32", "strict", "bfloat16", "float16"])
@pytest.mark.parametrize("epilogue", [Epilogue.BIAS, Epilogue.BIAS_RELU])
@pytest.mark.parametrize("name", ["3x3", "stem", "groups"])
def test_with_an_epilogue(name, epilogue, kind, device):
    """Every plan of one size, and micro-batches of several, also with one that leaves it out."""
    convolution = layer(name, Pass.FORWARD, kind).with_epilogue(epilogue)
    lhs, rhs = operands(convolution)
    bias = np.linspace(-3, 3, convolution.features_out).astype(lhs.dtype)
    spread = () if convolution.channels_last else (1,) * len(convolution.size)
    expected = reference(convolution, lhs, rhs) + np.float64(bias).reshape(-1, *spread)
    if epilogue == Epilogue.BIAS_RELU:
        expected = np.maximum(expected, 0)
    allowed = STRICT if kind == "strict" else TOLERANCE[convolution.dtype]
    found = plans_of(convolution.with_batch(6), device)
    assert found
    chosen = [configuration(convolution, (6, 6), device, i) for i in range(len(found))]
    alone = plans_of(convolution.with_epilogue(Epilogue.NONE).with_batch(6), device)[0]
    bare = dataclasses.replace(micro_of(6, alone), bare=True)
    mixed = [
        Configuration((bare, *chosen[0].micros[1:])),
        Configuration((chosen[0].micros[0], bare)),
    ]
    refused = []
    for way in (*chosen, *mixed, configuration(convolution, (5, 1, 6), device)):
        call = functools.partial(fused_convolution, convolution, way)
        try:
            result = jax.jit(call)(*jax.device_put((lhs, rhs, bias), device))
            result.block_until_ready()
        except jax.errors.JaxRuntimeError as unusable:
            assert "MISALIGNED" in str(unusable) and name == "stem"
            refused.append(way.micros[-1])
            continue
        assert error(result, expected) < allowed, way
    # cuDNN 9.19 offers one that cannot run on slices of 4 bytes' alignment; timing it tells
    for plan in found:
        if any((plan.engine, plan.knobs, plan.channels) == micro.algorithm for micro in refused):
            with pytest.raises(RuntimeError, match="MISALIGNED"):
                cudnn.seconds(convolution.with_batch(6), plan, device)
    assert len(refused) < len(chosen) / 2


def padded_calls(device, kind: str):
    """Each pass of a stem, and a fused one: what runs a configuration, and what it must give."""
    for which in Pass:
        convolution = layer("stem", which, kind)
        lhs, rhs = operands(convolution)
        expected = reference(convolution, lhs, rhs)
        yield convolution, functools.partial(micro_convolution, convolution), (lhs, rhs), expected
        if which == Pass.FORWARD:
            fused = convolution.with_epilogue(Epilogue.BIAS_RELU)
            bias = np.linspace(-3, 3, fused.features_out).astype(lhs.dtype)
            expected = np.maximum(expected + np.float64(bias), 0)
            yield fused, functools.partial(fused_convolution, fused), (lhs, rhs, bias), expected


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("channels", [4, 8])
def test_padded_channels(channels, kind, device):
    """Every padded plan of one size, twice, and uneven micro-batches with one that is not padded."""
    for convolution, call, arguments, expected in padded_calls(device, kind):
        arguments = jax.device_put(arguments, device)
        found = [p for p in plans_of(convolution.with_batch(6), device) if p.channels == channels]
        assert found, convolution
        chosen = [Configuration((micro_of(6, plan),) * 2) for plan in found]
        uneven = configuration(convolution, (5, 1), device, channels=channels).micros
        bare = configuration(convolution, (4,), device, channels=0).micros
        last = configuration(convolution, (2,), device, channels=channels).micros
        wrong, refused = [], []
        for way in (Configuration((*uneven, *bare, *last)), *chosen):
            try:
                result = np.asarray(jax.jit(functools.partial(call, way))(*arguments))
            except jax.errors.JaxRuntimeError as unusable:
                refused.append(str(unusable))
                continue
            off = error(result, expected)
            if not off < TOLERANCE[convolution.dtype]:  # NaN is wrong, too
                wrong.append((way, off))
        assert not wrong, convolution
        assert len(refused) <= len(found) / 4, refused


def test_padded_channels_may_be_recorded(device):
    """Copies and calls see the data of each run, recorded into a CUDA graph."""
    convolution = layer("stem", Pass.FORWARD, "bfloat16")
    chosen = configuration(convolution, (5, 7), device, channels=8)
    x, w = jax.device_put(operands(convolution), device)
    call = jax.jit(lambda x, w: micro_convolution(convolution, chosen, x, w) * 2)
    compiled = call.lower(x, w).compile(compiler_options={"xla_gpu_graph_min_graph_size": 1})
    own = jax.jit(lambda x, w: whole(convolution, x, w) * 2)
    for _ in range(5):
        assert error(compiled(x, w), np.float64(own(x, w))) < TOLERANCE["bfloat16"]
        x, w = x[::-1] * 1.5, w[:, ::-1]


def test_padding_is_timed(device):
    """What a padded way is said to take includes its copies: much of what there is to do here."""
    convolution = dataclasses.replace(
        layer("stem", Pass.FORWARD, "bfloat16"),
        batch=128,
        features_out=8,
        size=(112, 112),
        kernel=(1, 1),
        strides=(1, 1),
        padding=((0, 0), (0, 0)),
    )
    plan = next(p for p in plans_of(convolution, device) if p.channels == 8)
    wide = dataclasses.replace(convolution, features_in=8)
    bare = dataclasses.replace(plan, channels=0)
    padded, alone = (
        np.median(cudnn.seconds(c, p, device)) for c, p in ((convolution, plan), (wide, bare))
    )
    assert padded > alone > 0


def test_a_result_that_was_there_before_is_not_added_to(device):
    """Buffers are used again, so the first micro-batch must not read what is in dw."""
    convolution = layer("3x3", Pass.BACKWARD_FILTER, "strict")
    lhs, rhs = operands(convolution)
    chosen = configuration(convolution, (6, 6), device)
    call = jax.jit(lambda a, b: micro_convolution(convolution, chosen, a, b))
    lhs, rhs = jax.device_put((lhs, rhs), device)
    results = [np.asarray(call(lhs, rhs * scale)) for scale in (1, jnp.nan, 1)]
    assert np.isnan(results[1]).any()
    np.testing.assert_allclose(results[2], results[0], rtol=1e-4, atol=1e-3)


def test_sums_of_bfloat16_are_not_rounded_in_between(device):
    """Many small micro-batches are as near as the whole batch is."""
    convolution = layer("3x3", Pass.BACKWARD_FILTER, "bfloat16")
    lhs, rhs = operands(convolution)
    expected = reference(convolution, lhs, rhs)
    errors = [
        error(run(convolution, configuration(convolution, b, device), lhs, rhs, device), expected)
        for b in ((BATCH,), (1,) * BATCH)
    ]
    assert errors[1] < 3 * errors[0] + 1e-4


def test_what_is_wrong_is_told(device):
    convolution = layer("3x3", Pass.FORWARD, "strict")
    lhs, rhs = operands(convolution)
    [plan] = configuration(convolution, (BATCH,), device).micros
    greedy = max(cudnn.plans(convolution, device), key=lambda p: p.workspace)
    cases = {
        "have 8 samples, the batch 12": dataclasses.replace(plan, batch=8),
        "bytes of workspace": Micro(BATCH, greedy.engine, greedy.knobs, 0, math.nan),
        "vmem_jax micro_conv": dataclasses.replace(plan, engine=100_000),
    }
    assert greedy.workspace > 0
    for why, micro in cases.items():
        with pytest.raises(Exception, match=why):
            run(convolution, Configuration((micro,)), lhs, rhs, device).block_until_ready()


def test_the_ways_of_a_given_plan_are_tried(device, monkeypatch):
    """Each is run once; what another machine's cuDNN may do and this one's does not is an error."""
    convolution = layer("3x3", Pass.FORWARD, "strict")
    [first] = configuration(convolution, (BATCH // 2,), device).micros
    unknown = dataclasses.replace(first, engine=100_000)
    ran, check = [], cudnn.check
    monkeypatch.setattr(cudnn, "check", lambda part, *how: (ran.append(part), check(part, *how)))
    program = SimpleNamespace(steps=[SimpleNamespace(convolution=convolution)])
    given = lambda *micros: SimpleNamespace(divided=((0, Configuration(micros)),))
    try_configurations(program, given(first, first), device)
    assert ran == [convolution.with_batch(BATCH // 2)]
    with pytest.raises(PlanError, match=r"3×3.*that fails: .*Plan again for this machine"):
        try_configurations(program, given(first, unknown), device)


def test_times_are_those_of_work(device):
    """A batch of sixteen times the size takes longer, and nothing takes no time."""
    small = dataclasses.replace(layer("3x3", Pass.FORWARD, "strict"), size=(56, 56))
    medians = []
    for convolution in (small.with_batch(16), small.with_batch(256)):
        plan = min(cudnn.plans(convolution, device), key=lambda p: p.workspace)
        medians.append(np.median(cudnn.seconds(convolution, plan, device)))
    assert 0 < medians[0] < medians[1] / 4


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "launched"])
def test_command_buffers(recorded, device):
    """Every run sees its own data, whether its calls are recorded or launched."""
    forward = layer("3x3", Pass.FORWARD, "strict")
    filters = dataclasses.replace(forward, which=Pass.BACKWARD_FILTER)
    chosen = configuration(forward, (5, 7), device)
    of_filter = configuration(filters, (5, 7), device)

    def step(x, w):
        y = micro_convolution(forward, chosen, x, w)
        dw = micro_convolution(filters, of_filter, x, jnp.tanh(y))
        return y, w - 0.1 * dw

    def plain(x, w):
        y = whole(forward, x, w)
        return y, w - 0.1 * whole(filters, x, jnp.tanh(y))

    options = {"xla_gpu_graph_min_graph_size": 1}
    if not recorded:
        options["xla_gpu_enable_command_buffer"] = ""
    x, w = jax.device_put(operands(forward), device)
    compiled = jax.jit(step).lower(x, w).compile(compiler_options=options)
    own = jax.jit(plain)
    for _ in range(5):  # the first runs may be launched, and recorded later
        y, w_next = compiled(x, w)
        y_own, w_own = own(x, w)
        np.testing.assert_allclose(y, y_own, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(w_next, w_own, rtol=1e-3, atol=1e-2)
        x, w = x[::-1] * 1.01, w_next / jnp.abs(w_next).max()
