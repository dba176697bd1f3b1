"""Convolutions in micro-batches as a technique of the plan: whole training steps on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vmem_jax
from vmem_jax import UCuDNN
from vmem_jax.capture import capture
from vmem_jax.conv import candidates, cudnn
from vmem_jax.conv.candidates import choices_of
from vmem_jax.conv.database import Database, Entry, identity_of
from vmem_jax.conv.pick import by_xla, choose
from vmem_jax.core.cards import CARDS
from vmem_jax.core.convolution import XLA, Configuration, Micro, Pass
from vmem_jax.core.costs import Source, analytic
from vmem_jax.core.need import need_nbytes
from vmem_jax.policy.ucudnn import allowed
from vmem_jax.policy.workspace_reuse import BatchSizes

MIB = 2**20
MEANS = ("order", "recompute", "workspace")


def conv(x, w):
    with jax.named_scope(f"conv{w.shape[1]}to{w.shape[0]}"):
        numbers = ("NCHW", "OIHW", "NCHW")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def step(params, batch):
    x, y = batch

    def loss_of(params):
        h = jnp.tanh(conv(x, params["in"]))
        h = jnp.tanh(conv(h, params["wide"]))
        h = jnp.tanh(conv(h, params["back"]))
        return jnp.square(h.mean((2, 3)) @ params["out"] - y).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.1 * rng.standard_normal(shape), jnp.float32)
    params = {"in": draw(8, 3, 3, 3), "wide": draw(24, 8, 3, 3), "back": draw(8, 24, 3, 3)}
    return params | {"out": draw(8, 5)}, (draw(32, 3, 24, 24), draw(32, 5))


def heavy(name, program, costs, device, *rest):
    """XLA's own with a workspace that no budget here has, and quarters of the batch with little."""
    found = {}
    for s, x in enumerate(program.steps):
        if x.convolution:
            batch, seconds = x.convolution.batch, costs.seconds[s]
            own = Configuration((Micro(batch, XLA, (), 64 * MIB, seconds),))
            quarter = Micro(batch // 4, XLA, (), MIB // 8, 0.3 * seconds)
            found[s] = own, Configuration((quarter,) * 4)
    return found


@pytest.fixture(scope="module")
def budgeted():
    """The step in a budget in which every convolution has to be divided, and its plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "choices_of", heavy)
        found = vmem_jax.jit(step, budget=32 * MIB, allow=MEANS)
        return found, found.plan(*arguments())


def test_it_fits_divides_and_gives_the_same_numbers(budgeted):
    args = arguments()
    run, plan = budgeted
    assert len(plan.divided) == 8 and plan.fenced
    compiled = run.lower(*args).compile()
    assert need_nbytes(compiled) <= 32 * MIB
    # 8 layers' passes in quarters, and no whole one is left
    assert len(re.findall(r" convolution\(", compiled.as_text())) == 4 * 8
    expected, got = jax.jit(step)(*args), run(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, expected)


def test_explain_says_who_runs_what(budgeted):
    run, plan = budgeted
    text = str(run.explain(*arguments()))
    assert "8 convolutions in micro-batches" in " ".join(text.split())
    rows = [line for line in text.splitlines() if "conv8to24" in line and "4 × 8" in line]
    passes = {which for which in Pass for line in rows if f"│ {which.value} " in line}
    assert passes == set(Pass)
    assert sum("XLA, sliced" in line for line in text.splitlines()) == len(plan.divided)


def test_a_saved_plan_runs_again(budgeted, tmp_path):
    args, (_, plan) = arguments(), budgeted
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=vmem_jax.Plan.load(tmp_path / "plan.json"))
    assert need_nbytes(again.lower(*args).compile()) <= plan.budget
    np.testing.assert_allclose(again(*args)[1], jax.jit(step)(*args)[1], rtol=1e-5)


def program_and_costs():
    program = capture(jax.jit(step).trace(*arguments()).jaxpr).program
    return program, analytic(program, CARDS["h200"].machine)


def test_on_a_cpu_it_is_slices_of_xlas_own(monkeypatch):
    monkeypatch.setattr(candidates, "_MOST_PARTS", 4)  # fewer to compile
    program, costs = program_and_costs()
    found = choices_of("step", program, costs, jax.devices("cpu")[0])
    assert sorted(found) == [s for s, x in enumerate(program.steps) if x.convolution]
    for s, (own, *ways) in found.items():
        convolution = program.steps[s].convolution
        assert own.is_xlas and own.seconds == costs.seconds[s]
        assert own.workspace == by_xla(convolution).workspace
        for less, more in itertools.pairwise([*ways, own]):
            assert less.workspace < more.workspace and less.seconds >= more.seconds
            assert less.batch == convolution.batch and {m.engine for m in less.micros} == {XLA}
    assert any(ways for _, *ways in found.values())


def test_on_a_cpu_micro_batches_of_all_sizes_are_there_where_the_policy_has_them(monkeypatch):
    monkeypatch.setattr(candidates, "slice_by_xla", lambda c: Micro(c.batch, XLA, (), c.batch, 1.0))
    monkeypatch.setattr(candidates, "by_xla", lambda c: Micro(c.batch, XLA, (), 99, 1.0))
    program, costs = program_and_costs()
    device = jax.devices("cpu")[0]
    of = lambda sizes: choices_of("step", program, costs, device, sizes=sizes).values()
    parts = lambda sizes: {m.batch for _, *ways in of(sizes) for w in ways for m in w.micros}
    assert parts(BatchSizes.POWER_OF_TWO) == {1, 2, 4, 8, 16}
    assert parts(BatchSizes.ALL) > {1, 2, 4, 8, 16, 11} and parts(BatchSizes.UNDIVIDED) == set()
    # the sizes of the policy reach them
    budgeted = vmem_jax.jit(step, budget="1GiB", policy=UCuDNN("wr", limit=11, batch_sizes="all"))
    divided = budgeted.plan(*arguments()).divided
    assert divided and all(len(w.micros) == 3 for _, w in divided)  # as few as 11 samples allow


def test_in_strict_float32_xlas_own_takes_longer_than_the_fastest_that_was_timed(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(cudnn, "version", lambda: 91900)
    program, costs = program_and_costs()
    s = next(s for s, x in enumerate(program.steps) if x.convolution)
    known = dataclasses.replace(program.steps[s].convolution, strict=True, dtype="float32")
    steps = [
        dataclasses.replace(x, convolution=known) if i == s else x
        for i, x in enumerate(program.steps)
    ]
    program = dataclasses.replace(program, steps=tuple(steps))
    fastest = Micro(known.batch, 3, (), 4000, 1e-3)
    Database(identity_of("NVIDIA H200", "91900")).add({known: Entry((fastest,))})
    own, other = choices_of("step", program, costs, H200)[s]
    assert own.is_xlas and own.seconds == pytest.approx(candidates._STRICT * 1e-3)
    assert other.micros == (fastest,)


def test_what_cannot_be_divided_is_said():
    def dense(w, x):
        return w - jax.grad(lambda w: jnp.square(x @ w).sum())(w)

    with pytest.raises(
        ValueError, match="`dense` cannot divide convolutions: it has none on one device"
    ):
        vmem_jax.jit(dense, budget="1GiB", allow="workspace")(jnp.ones((4, 4)), jnp.ones((4, 4)))
    budgeted = vmem_jax.jit(dense, budget="1GiB", allow=MEANS)
    text = str(budgeted.explain(jnp.ones((4, 4)), jnp.ones((4, 4))))
    assert re.search(r"workspace is not used: .*has none on one device", " ".join(text.split()))


class H200:
    platform, device_kind = "gpu", "NVIDIA H200"


def test_on_a_gpu_it_is_what_was_timed_there(monkeypatch, tmp_path):
    """The fastest of the whole batch is XLA's own; what divides it comes from the same file."""
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(cudnn, "version", lambda: 91900)
    program, costs = program_and_costs()
    with pytest.raises(ValueError, match=r"none of its 8 was measured on NVIDIA H200: .*--conv"):
        choices_of("step", program, costs, H200)
    convolutions = {s: x.convolution for s, x in enumerate(program.steps) if x.convolution}
    s, known = next(iter(convolutions.items()))
    micros = lambda batch, *ways: Entry(
        tuple(Micro(batch, engine, (), workspace, ms * 1e-3) for engine, workspace, ms in ways)
    )
    entries = {
        known: micros(32, (3, 4000, 1.0), (5, 0, 8.0), (6, 2000, math.nan)),
        known.with_batch(16): micros(16, (3, 2000, 0.6)),
        known.with_batch(64): micros(64, (3, 1, 0.1)),
    }
    Database(identity_of("NVIDIA H200", "91900")).add(entries)
    steps = [dataclasses.replace(x, epilogue_nbytes=31 * 2**20) for x in program.steps]
    program = dataclasses.replace(program, steps=tuple(steps))  # as with a bias and a ReLU
    besides = 31 * 2**20 / CARDS["h200"].machine.bandwidth
    timed = dataclasses.replace(costs, sources=(Source.MEASURED,) * len(costs.seconds))
    for told, seconds in ((costs, 1e-3), (timed, costs.seconds[s])):  # a roofline gives way
        found = choices_of("step", program, told, H200)
        assert sorted(found) == [t for t, c in convolutions.items() if c == known]
        own, *ways = found[s]
        assert own.is_xlas and own.workspace == 4000 and own.seconds == pytest.approx(seconds)
        got = [(w.workspace, [m.engine for m in w.micros], w.seconds - besides) for w in ways]
        others = [(0, [5], pytest.approx(8e-3)), (2000, [3, 3], pytest.approx(1.2e-3))]
        assert got == (
            others if told is costs else [*others, (4000, [3], 1e-3)][: 3 if seconds > 1e-3 else 2]
        )
    # of a part of a batch XLA's own takes as much more than the fastest as of all of it
    double = program.steps[s].convolution.with_batch(64)
    twice = tuple(dataclasses.replace(x, convolution=double) for x in program.steps)
    whole = dataclasses.replace(program, steps=twice)
    slow = dataclasses.replace(timed, seconds=(3e-4,) * len(costs.seconds))
    own, *ways = choices_of("step", program, costs, H200, whole=(whole, slow))[s]
    assert own.is_xlas and own.seconds == pytest.approx(3e-3)  # 0.3 ms for 0.1 there, 1 here
    assert [m.engine for m in ways[-1].micros] == [3] and ways[-1].seconds < own.seconds
    assert choices_of("step", program, timed, H200, whole=(whole, slow)) == found
    # or as much less: not all that XLA has is in cuDNN's list
    quick = dataclasses.replace(timed, seconds=(2e-5,) * len(costs.seconds))
    own, *_ = choices_of("step", program, costs, H200, whole=(whole, quick))[s]
    assert own.is_xlas and own.seconds == pytest.approx(2e-4)  # 0.02 ms for 0.1 there, 1 here
    # of a part whose size was not timed it is what the next larger size takes, by its samples
    steps = [
        dataclasses.replace(x, convolution=known.with_batch(48)) if x.convolution == known else x
        for x in program.steps
    ]
    uneven = dataclasses.replace(program, steps=tuple(steps))
    with pytest.raises(ValueError, match="was measured"):
        choices_of("step", uneven, costs, H200)
    own, *_ = choices_of("step", uneven, costs, H200, whole=(whole, costs))[s]
    assert own.is_xlas and own.workspace == 1 and own.seconds == pytest.approx(0.75e-4)
    # the same for one convolution by itself
    monkeypatch.setattr(jax, "devices", lambda: [H200])
    assert [m.engine for m in choose(known, 3000).micros] == [3, 3]
    assert choose(known, 100).workspace == 0
    # what dividing makes useless is all there is for whole batches within a limit
    Database(identity_of("NVIDIA H200", "91900")).add({known.with_batch(8): micros(8, (3, 0, 0.3))})
    _, *ways = choices_of("step", program, costs, H200)[s]
    assert [[m.engine for m in w.micros] for w in ways] == [[3] * 4, [5]]
    assert [m.engine for m in allowed(ways, BatchSizes.UNDIVIDED)[0].micros] == [5]
    # by itself XLA's own may have been timed 0.1 ms too slow: what is faster by less is as fast
    Database(identity_of("NVIDIA H200", "91900")).add({known: micros(32, (7, 9000, 0.3))})
    for more, gain in ((9e-5, 0.0), (1.1e-4, 1.1e-4)):
        told = dataclasses.replace(timed, seconds=(3e-4 + besides + more,) * len(costs.seconds))
        own, *ways = choices_of("step", program, told, H200)[s]
        assert own.seconds - min([w.seconds for w in ways] + [own.seconds]) == pytest.approx(gain)
