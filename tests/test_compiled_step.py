"""`Compiled`: it holds its executable, takes what it was compiled for, and refuses the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_jit import assert_close, batch, params, step

import vmem_jax
from vmem_jax import DifferentiationError
from vmem_jax.api import stages
from vmem_jax.techniques import context


def named(tree, scale, *, negate=False):
    """A step with a tree, a static argument and one by name."""
    x = tree["x"] * scale
    return {"x": -x if negate else x}


@pytest.fixture
def compiles(monkeypatch):
    """The steps that are compiled from here on."""
    found, compile_jaxpr = [], context.compile_jaxpr

    def noted(*args, **options):
        found.append(options["name"])
        return compile_jaxpr(*args, **options)

    monkeypatch.setattr(context, "compile_jaxpr", noted)
    return found


def compiled(fun=step, args=None, budget="1GiB", **options):
    args = (params(), batch()) if args is None else args
    return vmem_jax.jit(fun, budget=budget, **options).lower(*args).compile()


def trees(x):
    return {"x": jnp.asarray(x, "float32")}


def test_it_does_what_the_step_does():
    assert_close(compiled(budget=0.6)(params(), batch()), jax.jit(step)(params(), batch()))


def test_shapes_alone_are_enough_to_compile_it():
    shapes = jax.eval_shape(lambda: (params(), batch()))
    assert_close(compiled(args=shapes)(params(), batch()), jax.jit(step)(params(), batch()))


def test_it_runs_without_planning_or_compiling_again(compiles):
    budgeted = vmem_jax.jit(step, budget="1GiB")
    found = budgeted.lower(params(), batch()).compile()
    expected = found(params(), batch())
    assert len(compiles) == 1
    plan, attempts = found.plan, found.attempts
    budgeted.clear_cache()
    jax.clear_caches()
    again = found(params(), batch())
    assert compiles == ["step"] and found.plan is plan and found.attempts is attempts
    for a, b in zip(*map(jax.tree.leaves, (expected, again)), strict=True):
        assert np.array_equal(a, b)
    budgeted(params(), batch())  # which has forgotten it
    assert len(compiles) == 2


@pytest.mark.parametrize("forget", [True, False])
def test_it_stays_when_the_step_is_gone(compiles, forget):
    budgeted = vmem_jax.jit(step, budget="1GiB")
    found = budgeted.lower(params(), batch()).compile()
    if forget:
        budgeted.clear_cache()
    del budgeted
    assert_close(found(params(), batch()), jax.jit(step)(params(), batch()))
    assert len(compiles) == 1


BAD = {
    "shape": lambda: (params(), batch(128)),
    "rank": lambda: (params(), batch()[0]),
    "dtype": lambda: (params(), batch().astype("bfloat16")),
    "python scalar": lambda: (params(), 1.0),
    "structure": lambda: (tuple(params()), batch()),
    "one leaf less": lambda: (params()[:-1], batch()),
    "one argument less": lambda: (params(),),
    "one argument more": lambda: (params(), batch(), batch()),
}


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("args", BAD.values(), ids=BAD)
def test_other_arguments_are_a_type_error_and_nothing_is_compiled(compiles, args, ran):
    found = compiled()
    if ran:
        found(params(), batch())
    compiles.clear()
    with pytest.raises(TypeError):
        found(*args())
    assert compiles == []
    assert_close(found(params(), batch()), jax.jit(step)(params(), batch()))


def test_from_its_second_call_on_it_looks_at_no_argument_itself(monkeypatch):
    found = compiled()
    expected = found(params(), batch())
    monkeypatch.setattr(stages.frameworks, "prepare", None)
    assert_close(found(params(), batch()), expected)


def test_an_argument_of_another_shape_is_named():
    with pytest.raises(TypeError, match=r"`x`.*float32\[256, ?32\].*float32\[128, ?32\]"):
        compiled()(params(), batch(128))


def test_another_static_argument_or_name_is_a_type_error():
    options = {"static_argnames": "negate"}
    budgeted = vmem_jax.jit(named, budget="1GiB", **options)
    found = budgeted.lower(trees([1, 2]), 3.0, negate=True).compile()
    assert np.array_equal(found(trees([1, 2]), 3.0, negate=True)["x"], [-3, -6])
    for call in (
        lambda: found(trees([1, 2]), 3.0, negate=False),
        lambda: found(trees([1, 2]), 3.0),
        lambda: found({"y": jnp.ones(2)}, 3.0, negate=True),
    ):
        with pytest.raises(TypeError):
            call()


def test_other_values_are_no_other_arguments():
    found = vmem_jax.jit(named, budget="1GiB").lower(trees([1, 2]), 3.0).compile()
    assert np.array_equal(found(trees([4, 5]), 2.0)["x"], [8, 10])
    assert np.array_equal(found({"x": np.array([4, 5], "float32")}, 2.0)["x"], [8, 10])


TRACES = {
    "jit": lambda call: jax.jit(call)(params(), batch()),
    "grad": lambda call: jax.grad(lambda x: jax.tree.leaves(call(params(), x))[0].sum())(batch()),
    "vmap": lambda call: jax.vmap(call, (None, 0))(params(), batch()[None]),
    "scan": lambda call: jax.lax.scan(lambda p, x: (call(p, x)[0], None), params(), batch()[None]),
}


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_it_cannot_be_traced(trace, ran):
    found = compiled()
    if ran:
        found(params(), batch())
    with pytest.raises(DifferentiationError):
        trace(found)


def test_donated_arguments_are_gone():
    found = compiled(donate_argnums=0)
    given = params()
    expected = jax.jit(step)(params(), batch())
    assert_close(found(given, batch()), expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    with pytest.raises((ValueError, RuntimeError)):
        found(given, batch())
