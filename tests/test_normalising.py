"""Convolutions that normalise their operand and sum their result: what is found, values, choice."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_carried as networks

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.fuse import fuse
from vmem_jax.capture.normalising import find_normalising
from vmem_jax.conv import carrying, cudnn
from vmem_jax.conv.call import TARGET
from vmem_jax.conv.carrying import Way, by_xla, ways
from vmem_jax.conv.layers import kernels_of
from vmem_jax.core.cards import CARDS
from vmem_jax.core.convolution import Epilogue, Micro, Pass
from vmem_jax.core.plan import Plan
from vmem_jax.core.slowdown import bare, slowdown
from vmem_jax.errors import TechniqueError
from vmem_jax.rewrite.normalising import with_normalising
from vmem_jax.techniques.carry import _worth
from vmem_jax.transfer import extension

MACHINE = CARDS["h200"].machine
raw = functools.partial(networks.raw, dtype="float16")
NORMALISED = ["forward, normalises, 2 sums", "backward filter, normalises"]
SUMS = ["forward, 2 sums"]


def relu_by_hand(x, layers):
    """With another affine form, and another maximum: the same to cuDNN."""
    y = x
    for kernel, scale, bias in layers:
        raw = networks.conv(y, kernel)
        wide = raw.astype(jnp.float32)
        mean, square = wide.mean((0, 1, 2)), (wide * wide).mean((0, 1, 2))
        wide = -(mean - wide) / jnp.sqrt(square - mean**2 + 1e-5) * scale - (-bias)
        y = jnp.maximum(jnp.zeros_like(wide), wide).astype(raw.dtype)
    return y


def read_twice(x, layers):
    """What else than a convolution reads exists."""
    y = x
    for kernel, scale, bias in layers:
        y = jax.nn.relu(networks.batch_norm(networks.conv(y, kernel), scale, bias))
        y = y + jnp.roll(y, 1, 1)
    return y


def leaky(x, layers):
    y = x
    for kernel, scale, bias in layers:
        y = jax.nn.leaky_relu(networks.batch_norm(networks.conv(y, kernel), scale, bias))
    return y


def quantized(x, layers, dtype):
    """What a cast makes of it is not affine."""
    y = x
    for kernel, scale, bias in layers:
        wide = 2 * networks.batch_norm(networks.conv(y, kernel), scale, bias)
        y = jax.nn.relu(wide.astype(dtype)).astype(x.dtype)
    return x + y


CASES = {
    "batch norm": (lambda: raw(networks.bottleneck), [*NORMALISED * 4, *SUMS * 6]),
    "Linen": (lambda: networks.linen("float16"), [*NORMALISED * 4, *SUMS * 6]),
    "NNX": (lambda: networks.of_nnx("float16"), [*NORMALISED * 4, *SUMS * 6]),
    "strides": (lambda: raw(networks.strided), [*NORMALISED * 5, *SUMS * 6]),
    "by hand": (lambda: raw(relu_by_hand), [*NORMALISED * 5, *SUMS * 6]),
    "no ReLU": (lambda: raw(networks.without_relu), SUMS * 6),
    "leaky ReLU": (lambda: raw(leaky), SUMS * 6),
    "read twice": (lambda: raw(read_twice), SUMS * 6),
    "GELU": (lambda: raw(networks.gelu), SUMS * 6),
    "integers": (lambda: raw(functools.partial(quantized, dtype="int32")), SUMS * 6),
    "8 bits": (lambda: raw(functools.partial(quantized, dtype="float8_e4m3fn")), SUMS * 6),
    "no statistics": (
        lambda: raw(networks.without_statistics),
        ["forward, normalises", "backward filter, normalises"] * 4,
    ),
    "two passes": (  # the sum of squares is of what the mean was taken from
        lambda: raw(networks.in_two_passes),
        [*["forward, normalises, 1 sums", NORMALISED[1]] * 5, *["forward, 1 sums"] * 6],
    ),
    "a norm over channels": (lambda: raw(networks.layer_norm), []),
    "bfloat16": (lambda: networks.raw(networks.bottleneck), []),
    "channels first": (networks.equinox, []),
}


def found_in(case):
    step, args = case
    flat = capture(jax.jit(step).trace(*args).jaxpr).separate
    return flat, find_normalising(flat)


def described(found):
    texts = []
    for each in found:
        c = each.matched.convolution
        assert c.prologue == (each.prologue is not None)
        assert (c.epilogue == Epilogue.SUMS) == (c.which == Pass.FORWARD)
        text = c.which.value + (", normalises" if each.prologue else "")
        texts.append(text + (f", {len(each.sums)} sums" if each.sums else ""))
    return texts


def all_of(found):
    """Each convolution once, with a prologue where it can have one, by XLA."""
    first = {}
    for each in found:
        first.setdefault(each.equation, each)
    return {each: by_xla(each.matched.convolution).configuration for each in first.values()}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name):
    make, expected = CASES[name]
    assert described(found_in(make())[1]) == expected


@pytest.mark.parametrize("name", [name for name, (_, expected) in CASES.items() if expected])
def test_its_values_are_near_those_of_the_step(name):
    """Scale and bias are rounded to float16, by which some values are off by several times as much as
    by all other roundings of the step; where they are in float16 anyway, by no more."""
    step, args = CASES[name][0]()
    flat, found = found_in((step, args))
    ours = with_normalising(flat, all_of(found))
    compat.check_jaxpr(ours)
    operands = {each.prologue.operand for each in found if each.prologue}
    exist = {v for kernel in fuse(ours) for v in (*kernel.reads, *kernel.writes)}
    assert operands.isdisjoint(exist)
    calls = [e for e in compat.open_jaxpr(ours).eqns if e.primitive.name.startswith("normalising")]
    assert len(calls) == len(all_of(found))
    summed = lambda jaxpr: [
        e for e in compat.open_jaxpr(jaxpr).eqns if e.primitive.name == "reduce_sum"
    ]
    assert len(summed(flat)) - len(summed(ours)) == sum(len(each.sums) for each in all_of(found))
    most = 1.01 if name in ("no statistics", "no ReLU", "GELU", "leaky ReLU") else 8
    wide = [a.astype(jnp.float32) for a in jax.tree.leaves(args)]
    exact = _in_float32(flat, wide)
    off = lambda x, y: float(np.sqrt(np.square(np.asarray(x, np.float64) - np.asarray(y)).mean()))
    for a, b, value in zip(
        networks.rounded(ours, args), networks.rounded(flat, args), exact, strict=True
    ):
        size = float(np.sqrt(np.square(value).mean()))
        assert off(a, value) <= most * off(b, value) + 1e-3 * size


def _in_float32(flat, args):
    """The values of `flat` without roundings to 16 bits."""
    opened = compat.open_jaxpr(flat)
    values = dict(zip(opened.invars, args, strict=True))
    values |= dict(zip(opened.constvars, compat.constants(flat), strict=True))
    read = lambda a: a.val if isinstance(a, compat.Literal) else values[a]
    for eqn in opened.eqns:
        params = dict(eqn.params)
        for key in ("new_dtype", "preferred_element_type"):
            if params.get(key) is not None and jnp.dtype(params[key]) == jnp.float16:
                params[key] = jnp.dtype("float32")
        operands = [read(a) for a in eqn.invars]
        operands = [
            np.float32(a) if isinstance(e, compat.Literal) and e.aval.dtype == jnp.float16 else a
            for a, e in zip(operands, eqn.invars, strict=True)
        ]
        made = eqn.primitive.bind(*operands, **params)
        made = made if eqn.primitive.multiple_results else [made]
        values.update(zip(eqn.outvars, made, strict=True))
    return [np.asarray(read(a)) for a in opened.outvars]


def test_a_plan_carries_where_allow_names_it(tmp_path):
    step, args = raw(networks.bottleneck)
    allow = ("order", "recompute", "carry")
    made = vmem_jax.jit(step, budget=1.0, policy="exact", allow=allow)
    plan = made.plan(*args)
    assert "10 convolutions with what stands around them" in str(plan)
    plain = vmem_jax.jit(step, budget=1.0, policy="exact").plan(*args)
    assert not plain.carried and plan.predicted_peak < plain.predicted_peak
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=Plan.load(tmp_path / "plan.json"), allow=allow)
    for a, b in zip(*(jax.tree.leaves(each(*args)) for each in (made, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    exact = jax.tree.leaves(jax.jit(raw(networks.bottleneck, dtype="float32")[0])(*args))
    for a, value in zip(jax.tree.leaves(again(*args)), exact, strict=True):
        np.testing.assert_allclose(a, value, atol=0.01)


def test_nothing_is_carried_where_the_batch_runs_in_parts():
    step, args = raw(networks.without_statistics)
    allow = ("order", "sub_batches", "carry")
    plan = vmem_jax.jit(step, budget="1GiB", allow=allow, sub_batches=2).plan(*args)
    assert plan.sub_batches == 2 and not plan.carried
    with pytest.raises(TechniqueError, match="need all samples at once"):
        vmem_jax.jit(step, budget="1GiB", allow="carry", sub_batches=2).plan(*args)
    assert vmem_jax.jit(step, budget=1.0, policy="exact", allow=allow).plan(*args).carried


def test_their_kernels_are_timed_where_that_is_asked_for():
    step, args = raw(networks.bottleneck)
    jaxpr = jax.jit(step).trace(*args).jaxpr
    alone, every = kernels_of(jaxpr), kernels_of(jaxpr, carrying=True)
    assert every[: len(alone)] == alone
    found = find_normalising(capture(jaxpr).separate)
    assert set(every) - set(alone) == {each.matched.convolution for each in found}


def test_what_takes_longer_than_the_passes_it_replaces_is_left_alone():
    found = found_in(raw(networks.bottleneck))[1]
    distinct = {each.matched.convolution for each in found}
    passed = lambda c: (2 * c.x_nbytes * c.prologue + c.y_nbytes) / MACHINE.bandwidth
    way = lambda c, more: Way(by_xla(c).configuration, more)
    of = lambda chosen: [described([found[i]])[0] for i in chosen]
    fast = {c: way(c, 0.0) for c in distinct}
    assert of(_worth(found, fast, MACHINE, True)) == [*NORMALISED * 4, *SUMS * 2]
    slow = {c: way(c, 1.1 * passed(c)) for c in distinct}
    assert not _worth(found, slow, MACHINE, True)
    # a gradient that takes too long leaves sums to the forward pass
    gradients = {c for c in distinct if c.which == Pass.BACKWARD_FILTER}
    mixed = fast | {c: way(c, 1.0) for c in gradients}
    assert of(_worth(found, mixed, MACHINE, True)) == SUMS * 6
    none = {c: w for c, w in fast.items() if c not in gradients}
    assert of(_worth(found, none, MACHINE, True)) == SUMS * 6


def test_measured_times_decide_before_those_of_another_machine(monkeypatch):
    [first, *_] = found_in(raw(networks.bottleneck))[1]
    c = first.matched.convolution
    named = Micro(c.batch, 7, (), 100, 0.0)
    monkeypatch.setattr(carrying, "_named", lambda c, target: named)
    [way] = ways([c], "h200", MACHINE, None).values()
    assert way.configuration.micros == (named,)
    seconds = MACHINE.convolution_seconds(bare(c))
    assert way.more == pytest.approx((slowdown(c) - 1) * seconds) and slowdown(c) > 1
    timed = {
        c: [
            Micro(c.batch, 2, (), 5, 3e-3),
            Micro(c.batch, 3, (), 0, 2e-3),
            Micro(1, 4, (), 0, 1e-6),
        ],
        bare(c): [Micro(c.batch, 1, (), 0, 1.5e-3)],
    }
    monkeypatch.setattr(carrying, "known", lambda device: lambda c: timed.get(c, []))
    [way] = ways([c], jax.devices()[0], MACHINE, None).values()
    assert [m.engine for m in way.configuration.micros] == [3]
    assert way.more == pytest.approx(0.5e-3)
    monkeypatch.setattr(carrying, "_named", lambda c, target: None)
    assert not ways([c], "h200", MACHINE, None)


def test_a_plan_that_pads_the_channels_of_an_image_is_called_with_as_many(monkeypatch):
    """cuDNN sums behind a first convolution of 3 channels only where these are padded."""
    step, args = raw(networks.bottleneck)
    [first, *_] = found_in((step, args))[1]
    stem = dataclasses.replace(
        first.matched.convolution, features_in=3, prologue=False, epilogue=Epilogue.SUMS
    )
    padded = cudnn.Plan(5, ((1, 2),), 100, frozenset(), False, "A", channels=8)
    monkeypatch.setattr(cudnn, "plans", lambda c, target: (padded,))
    [way] = ways([stem], "h200", MACHINE, False).values()
    [micro] = way.configuration.micros
    assert micro.algorithm == (5, ((1, 2),), 8) and micro.workspace == 100


@pytest.mark.gpu_compile
@pytest.mark.skipif(
    extension.load().CUDNN_BUILT is None, reason="the extension was built without cuDNN's headers"
)
def test_cudnn_carries_them_on_an_h200():
    """Of a batch with which passes take longer than launches."""
    step, (params, x) = raw(networks.bottleneck)
    x = jax.ShapeDtypeStruct((4096, *x.shape[1:]), x.dtype)
    options = {"budget": 1.0, "policy": "exact"}
    compiled = vmem_jax.jit(step, allow=("order", "carry"), **options)
    compiled = compiled.lower(params, x).compile(target="h200")
    carried = len(compiled.plan.carried)
    text = compiled.as_text()
    assert carried >= 6
    assert text.count(f'custom_call_target="{TARGET}"') == carried
    assert text.count('custom_call_target="__cudnn$conv') <= 17 - carried
    plain = vmem_jax.jit(step, allow="order", **options).lower(params, x)
    seconds = plain.compile(target="h200").plan.predicted_seconds
    assert compiled.plan.predicted_seconds < seconds
    unasked = vmem_jax.jit(step, **options).lower(params, x).compile(target="h200")
    assert unasked.plan.carried == compiled.plan.carried
    for policy, card in (("vdnn", "h200"), ("exact", "a100")):
        others = vmem_jax.jit(step, budget=1.0, policy=policy).lower(params, x)
        assert not others.compile(target=card).plan.carried
