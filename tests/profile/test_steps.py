"""Timing on the CPU: every step gets seconds and says from where; nothing here looks at a clock."""

import dataclasses
import itertools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import Source, analytic
from vmem_jax.profile import steps as steps_module
from vmem_jax.profile import timing as timing_module
from vmem_jax.profile.calibrate import Timing
from vmem_jax.profile.steps import distinct_parts, profile_steps
from vmem_jax.profile.timing import Dispatch, Operands

CPU = CARDS["cpu"].machine


@pytest.fixture
def device():
    return jax.devices("cpu")[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing_module, "_LOOP_SECONDS", 1e-4)
    monkeypatch.setattr(timing_module, "_PROGRAM_SECONDS", 2e-5)


def train(params, x, labels, key):
    def loss(params):
        y = x
        for w in params:
            y = jax.nn.relu(y @ w)
        y = y * jax.random.bernoulli(key, 0.5, y.shape)
        return -jnp.mean(jax.nn.log_softmax(y)[jnp.arange(x.shape[0]), labels])

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def make(layers=4, batch=8, width=16):
    w = jax.ShapeDtypeStruct((width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return capture(jax.jit(train).trace([w] * layers, x, labels, key).jaxpr)


def test_every_step_gets_seconds_and_says_from_where(device):
    found = make()
    timings = {}
    profile = profile_steps(found, CPU, device, timings)
    assert len(profile.costs.seconds) == len(found.program.steps)
    assert all(math.isfinite(s) and s > 0 for s in profile.costs.seconds)
    assert set(profile.costs.sources) == {Source.MEASURED} and not profile.untimed
    assert profile.measured == profile.distinct == len(timings)
    distinct = distinct_parts(found, "cpu")
    assert profile.distinct < sum(part.count for part in distinct.parts.values())
    assert profile.costs.error is not None


def test_what_was_timed_is_not_timed_again(device, monkeypatch):
    found = make(layers=5)
    timings = {}
    profile_steps(found, CPU, device, timings)
    monkeypatch.setattr(steps_module, "time_step", None)  # a call of it would fail
    again = profile_steps(make(layers=8), CPU, device, timings)
    assert again.reused == again.distinct and set(again.costs.sources) == {Source.MEASURED}


def test_the_limit_is_kept_longest_first_and_the_rest_calibrated(device, monkeypatch):
    found = make()
    clock = itertools.count(step=10.0)
    fake_time = types.SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(steps_module, "time", fake_time)
    seen, timed = [], []

    def fake(isolated, operands, *, expected, **_):
        timed.append(isolated.key)
        return 3 * expected

    monkeypatch.setattr(steps_module, "time_step", fake)
    profile = profile_steps(
        found, CPU, device, {}, seconds=35.0, on_progress=lambda *a: seen.append(a)
    )
    assert profile.measured == len(timed) == 3  # at 10, 20 and 30 s
    assert profile.calibrated == profile.distinct - 3
    assert set(profile.costs.sources) == {Source.MEASURED, Source.CALIBRATED}
    # those of a class that was timed are slower by the same factor; of another, one expects so
    roofline = analytic(found.program, CPU).seconds
    slower = [s / r for s, r in zip(profile.costs.seconds, roofline, strict=True)]
    assert {round(f, 6) for f in slower if f > 2} == {3.0}
    assert all(1 < f <= 3.000001 for f in slower)
    assert profile.costs.error == pytest.approx(0.0, abs=1e-9)
    parts = distinct_parts(found, "cpu").parts
    expected = lambda key: sum(roofline[s] for s in parts[key].steps) * parts[key].count
    assert timed == sorted(parts, key=expected, reverse=True)[:3]
    assert [done for done, _, _ in seen[:3]] == [0, 1, 2] and seen[-1][0] == seen[-1][1]


def test_no_time_at_all_is_the_roofline(device):
    found = make()
    profile = profile_steps(found, CPU, device, {}, seconds=-1.0)
    assert profile.costs.seconds == analytic(found.program, CPU).seconds
    assert set(profile.costs.sources) == {Source.ROOFLINE}


def test_a_step_too_large_is_scaled_from_a_part_and_says_so(device):
    found = make(layers=1, batch=64, width=8)
    product = found.program.steps[0].nbytes
    timings = {}
    profile = profile_steps(found, CPU, device, timings, limit_nbytes=product - 1)
    scaled = [t for t in timings.values() if t.source is Source.SCALED]
    assert scaled and profile.scaled == len(scaled)
    assert "32 of 64" in {t.batch for t in scaled} <= {"32 of 64", "16 of 64"}
    assert all(t.seconds > 0 for t in scaled)


def test_what_cannot_be_cut_is_calibrated(device):
    found = make(layers=2)
    profile = profile_steps(found, CPU, device, {}, limit_nbytes=700)  # no row of a product fits
    assert profile.calibrated > 0 and Source.CALIBRATED in profile.costs.sources


def test_out_of_memory_means_half_of_the_batch(device, monkeypatch):
    found = make(layers=1, batch=64)
    tried = []

    def fake(isolated, *args, **kwargs):
        rows = isolated.avals[0].shape[0]
        tried.append(rows)
        if rows > 16:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no")
        return 1e-3

    monkeypatch.setattr(steps_module, "time_step", fake)
    every = [part.isolated for part in distinct_parts(found, "cpu").parts.values()]
    isolated = next(alone for alone in every if alone.what.startswith("dot"))
    timing = steps_module._time(
        isolated, Operands(device, 1 << 20),
        expected=1.0, workspace=0, limit=1 << 20,
        dispatch=Dispatch(), compiler=None,
    )  # fmt: skip
    assert tried == sorted(tried, reverse=True) and tried[0] == 64 and tried[-1] <= 16
    assert timing.source is Source.SCALED
    assert timing.seconds == pytest.approx(1e-3 * 64 / tried[-1])


def test_a_step_that_does_not_compile_is_left_to_the_roofline(device, monkeypatch):
    def fake(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such thing")

    monkeypatch.setattr(steps_module, "time_step", fake)
    profile = profile_steps(make(), CPU, device, {})
    assert profile.measured == 0 and set(profile.costs.sources) == {Source.ROOFLINE}


def test_what_cannot_run_alone_is_named_and_not_run(device):
    def fun(x):
        jax.debug.callback(lambda v: 1 / 0, x)
        return jnp.sin(x) @ x

    found = capture(jax.jit(fun).trace(jax.ShapeDtypeStruct((8, 8), jnp.float32)).jaxpr)
    profile = profile_steps(found, CPU, device, {})
    assert len(profile.untimed) == 1 and "debug_callback" in profile.untimed[0]
    assert all(s > 0 for s in profile.costs.seconds)


def test_an_update_in_place_is_timed(device):
    def fun(x, y):
        return lax.dynamic_update_slice(jnp.sin(x), y, (0, 0)) @ x

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 8), (2, 8))]
    found = capture(jax.jit(fun).trace(*shapes).jaxpr)
    profile = profile_steps(found, CPU, device, {})
    assert profile.measured == profile.distinct


@pytest.mark.parametrize("free", [True, False])
def test_layouts_free_or_not(device, free):
    profile = profile_steps(make(layers=2), CPU, device, {}, free_layouts=free)
    assert profile.measured == profile.distinct


def test_compiling_ahead_on_several_threads_changes_nothing(device, monkeypatch):
    compiled = []
    real = steps_module.compile_step
    monkeypatch.setattr(
        steps_module, "compile_step", lambda i, d, c, f: compiled.append(i.key) or real(i, d, c, f)
    )
    profile = profile_steps(make(), CPU, device, {}, workers=2)
    assert profile.measured == profile.distinct <= len(compiled)
    # the time is up while the first are compiled: those are timed, and no more
    compiled.clear()
    clock = itertools.count(step=1.0)
    fake_time = types.SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(steps_module, "time", fake_time)
    profile = profile_steps(make(), CPU, device, {}, workers=2, seconds=1.5)
    assert profile.measured == 4 == len(set(compiled))


@pytest.mark.gpu_compile
def test_every_copy_of_a_convolution_is_one_library_call():
    """For a card that is not there. The flip is folded away, and nothing is merged or dropped."""
    from vmem_jax.devices.targets import target

    kernels = [jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)] * 2
    x = jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.bfloat16)

    def loss(kernels, x):
        for k in kernels:
            form = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=form)
        return jnp.sum(jnp.sin(x.astype(jnp.float32)))

    found = capture(jax.jit(jax.grad(loss)).trace(kernels, x).jaxpr)
    calls = []
    parts = distinct_parts(found, "gpu").parts.values()
    for isolated in [part.isolated for part in parts]:
        if isolated.what.startswith("conv_general_dilated "):
            text = timing_module.compile_step(isolated, target("h200").device(), 3).as_text()
            targets = re.findall(r'custom_call_target="__cudnn\$conv(\w+)"', text)
            assert len(targets) == 3 and len(set(targets)) == 1
            calls.append(targets[0])
    assert {"Forward", "BackwardInput", "BackwardFilter"} == set(calls)


# -- operands


def test_operands_are_in_range_and_distinct(device):
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = [((8, 8), "float32"), ((8, 8), "float32"), ((4,), "int32"), ((64,), "bool")]
    avals = [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in shapes] + [key]
    a, b, labels, bools, keys = Operands(device, 1 << 20).of(avals)
    assert a is not b and np.isfinite(a).all() and np.std(a) > 0.5
    assert not labels.any() and 0 < bools.sum() < 64
    assert jax.random.uniform(keys) >= 0
    for dtype in (jnp.bfloat16, jnp.complex64, jnp.uint8):
        (x,) = Operands(device, 1 << 20).of([jax.ShapeDtypeStruct((3, 5), dtype)])
        assert x.dtype == dtype and x.shape == (3, 5)


def test_values_of_the_inside_are_what_a_relu_leaves(device):
    avals = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3
    weight, value, other = Operands(device, 1 << 20).of(avals, (False, True, True))
    assert (np.asarray(weight) < 0).any() and value is not other
    assert (np.asarray(value) >= 0).all() and 0.4 < np.mean(np.asarray(value) == 0) < 0.6


def test_operands_are_kept_while_there_is_room(device):
    operands = Operands(device, 4000)
    small = jax.ShapeDtypeStruct((100,), jnp.float32)
    (first,) = operands.of([small])
    assert operands.of([small])[0] is first
    operands.of([jax.ShapeDtypeStruct((950,), jnp.float32)])
    assert operands.of([small])[0] is not first


def test_timing_is_a_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Timing(1.0, Source.MEASURED).seconds = 2.0
