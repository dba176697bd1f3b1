"""Convolutions in CUDA graphs: which steps have them, from which call on, and what if they cannot be.

Options of the CPU's compiler stand for those of the GPU's, which only a GPU runs.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.compiler import recorded
from vmem_jax.compiler.compile import recording
from vmem_jax.compiler.recorded import Recorded
from vmem_jax.jax_compat import GRAPH_OPTIONS, GRAPHS, VERSION

FLAG = f"--{GRAPHS}="
OTHER = {"xla_cpu_enable_fast_min_max": True}


def images(w, x):
    form = ("NHWC", "HWIO", "NHWC")
    loss = lambda w: (
        jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=form) ** 2
    ).mean()
    return w - jax.grad(loss)(w)


def product(w, x):
    return w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


IMAGES = jnp.full((3, 3, 4, 4), 0.1), jnp.ones((2, 8, 8, 4))
PRODUCT = jnp.full((8, 8), 0.1), jnp.ones((4, 8))


@pytest.fixture
def compiles(monkeypatch):
    """The options of each compilation, where OTHER has convolutions in graphs."""
    monkeypatch.setattr(compat, "GRAPH_OPTIONS", {"cpu": OTHER})
    compile_, seen = jax.stages.Lowered.compile, []

    def compile(self, compiler_options=None):
        seen.append(dict(compiler_options or {}))
        return compile_(self, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    return seen


def with_others(seen):
    return [OTHER.items() <= options.items() for options in seen]


@pytest.mark.parametrize("flags", ["", "--xla_gpu_autotune_level=0", FLAG, f"{FLAG}-convolution"])
def test_the_user_says_what_graphs_hold(flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    held = recording({}, "gpu").get(GRAPHS, "").split(",")
    assert ("CONVOLUTION" in held) is (GRAPHS not in flags and VERSION >= (0, 11))
    assert not recording({GRAPHS: "FUSION"}, "gpu") and not recording({}, "cpu")


@pytest.mark.parametrize("donated", [(), (0,)])
def test_the_first_call_compiles_the_recorded_program(donated, compiles):
    step = vmem_jax.jit(images, budget=1.0, policy="exact", donate_argnums=donated)
    w, x = IMAGES
    given = w + 0
    step.lower(given, x).compile()
    assert not any(with_others(compiles))
    for _ in range(3):
        given = step(given, x)
        assert with_others(compiles) == [False] * (len(compiles) - 1) + [True]
    for _ in range(3):
        w = jax.jit(images)(w, x)
    assert jnp.allclose(given, w)


def test_a_step_without_convolutions_is_compiled_once(compiles):
    step = vmem_jax.jit(product, budget=1.0, policy="exact")
    for _ in range(3):
        step(*PRODUCT)
    assert compiles and not any(with_others(compiles))


def test_a_policy_that_leaves_the_program_plain_leaves_its_convolutions(compiles):
    lowered = vmem_jax.jit(images, budget=1.0, policy="exact").lower(*IMAGES)
    assert isinstance(lowered.compile()._entry.best.compiled, Recorded)
    keep = vmem_jax.jit(images, budget=1.0, policy="keep").lower(*IMAGES)
    assert not isinstance(keep.compile()._entry.best.compiled, Recorded)


class Program:
    """A compiled step that counts its calls, or fails."""

    def __init__(self, nbytes=0, error=None, deletes=False):
        self.calls, self.nbytes, self.error, self.deletes = 0, nbytes, error, deletes

    def __call__(self, x):
        self.calls += 1
        if self.deletes:
            x.delete()
        if self.error:
            raise jax.errors.JaxRuntimeError(self.error)
        return x


@pytest.fixture
def needs(monkeypatch):
    monkeypatch.setattr(recorded, "need_nbytes", lambda program: program.nbytes)


def test_a_graph_that_needs_more_is_left(needs):
    launched, other = Program(5), Program(6)
    step = Recorded(launched, lambda: other)
    for _ in range(3):
        step(jnp.ones(2))
    assert (launched.calls, other.calls) == (3, 0) and step.nbytes == 5


def test_a_graph_that_does_not_compile_is_left(needs):
    def fails():
        raise jax.errors.JaxRuntimeError("INTERNAL: no graphs")

    launched = Program()
    step = Recorded(launched, fails)
    for _ in range(3):
        step(jnp.ones(2))
    assert launched.calls == 3


def test_a_graph_that_cannot_run_is_left_while_the_arguments_are_there(needs):
    launched, other = Program(), Program(error="INTERNAL: capture failed")
    step = Recorded(launched, lambda: other)
    for _ in range(3):
        step(jnp.ones(2))
    assert (launched.calls, other.calls) == (3, 1)


def test_a_graph_that_took_its_arguments_along_is_an_error(needs):
    step = Recorded(Program(), lambda: Program(error="INTERNAL: capture failed", deletes=True))
    step(jnp.ones(2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="capture failed"):
        step(jnp.ones(2))


def test_what_runs_is_the_recorded_program(needs):
    launched, other = Program(), Program()
    step = Recorded(launched, lambda: other)
    for _ in range(4):
        step(jnp.ones(2))
    assert (launched.calls, other.calls) == (1, 3)


@pytest.mark.gpu_compile
def test_a_step_for_a_card_that_is_not_there_is_compiled_once():
    args = [jax.ShapeDtypeStruct(a.shape, "bfloat16") for a in IMAGES]
    made = vmem_jax.jit(images, budget="1GiB", policy="exact").lower(*args).compile(target="h200")
    assert not isinstance(made._entry.best.compiled, Recorded)


@pytest.mark.gpu_compile
def test_xla_takes_what_graphs_are_to_hold(tmp_path):
    ours = GRAPH_OPTIONS["gpu"]
    dumped = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    args = [jax.ShapeDtypeStruct(a.shape, "bfloat16") for a in IMAGES]
    step = vmem_jax.jit(images, budget="1GiB", compiler_options={**dumped, **ours})
    step.lower(*args).compile(target="h200")
    text = "".join(path.read_text() for path in tmp_path.glob("*debug_options"))
    held = {*re.findall(rf"{GRAPHS}: (\w+)", text)}
    assert ("CONVOLUTION" in held) is (VERSION >= (0, 11))
    assert not ours or held == {*ours[GRAPHS].split(",")}
