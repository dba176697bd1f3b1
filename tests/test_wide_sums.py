"""Products in 16 bits whose results sub-batches add up in float32."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jexc

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.batch import follow_batch
from vmem_jax.capture.layouts import Layout
from vmem_jax.capture.wide_sums import with_wide_sums
from vmem_jax.core.plan import keep_plan
from vmem_jax.rewrite.rewrite import rewrite

WIDE, NARROW, HALF = jnp.float32, jnp.bfloat16, jnp.float16
N = 8


def product(x, y, **options):
    return jnp.einsum("bi,bj->ij", x, y, **options)


def cast(total, x, y):
    return total + product(x, y).astype(total.dtype)


def turned(total, x, y):
    return total + product(x, y).reshape(N, N, 1).T[0].astype(total.dtype)


def turned_when_cast(total, x, y):
    return total + product(x, y).astype(total.dtype).T


def scaled(total, x, y):
    return total + 2 * product(x, y).astype(total.dtype)


def also_returned(total, x, y):
    made = product(x, y)
    return total + made.astype(total.dtype), made


def read_twice(total, x, y):
    made = product(x, y)
    return total + made.astype(total.dtype), made.max()


def rounded(total, x, y):
    return total + jnp.sin(product(x, y)).astype(total.dtype)


def by_an_algorithm(total, x, y):
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    return total + product(x, y, precision=algorithm).astype(total.dtype)


def doubled(total, x, y):
    return total + total + product(x, y).astype(total.dtype)


def wide_already(total, x, y):
    return total + product(x, y, preferred_element_type=total.dtype)


def products_of(step, dtype, total):
    """The dtypes that products of `step` are made in, before and after."""
    shapes = [jax.ShapeDtypeStruct((N, N), each) for each in (total, dtype, dtype)]
    closed = jax.make_jaxpr(step)(*shapes)
    opened = compat.open_jaxpr(closed)
    found = with_wide_sums(opened.eqns, {opened.invars[0]}, opened.outvars)
    again = compat.close([], [], opened.invars, opened.outvars, found, closed)

    jax.jit(jexc.jaxpr_as_fun(again)).trace(*shapes)
    of = lambda eqns: [
        eqn.outvars[0].aval.dtype for eqn in eqns if eqn.primitive.name == "dot_general"
    ]
    return of(opened.eqns), of(found)


@pytest.mark.parametrize("dtype", [NARROW, HALF])
@pytest.mark.parametrize("step", [cast, turned, turned_when_cast])
def test_what_only_a_sum_with_a_total_reads_is_made_as_wide(step, dtype):
    assert products_of(step, dtype, WIDE) == ([dtype], [WIDE])


@pytest.mark.parametrize(
    "step", [scaled, also_returned, read_twice, rounded, by_an_algorithm, doubled]
)
def test_what_is_computed_with_first_or_read_elsewhere_stays(step):
    assert products_of(step, NARROW, WIDE) == ([NARROW], [NARROW])


@pytest.mark.parametrize(
    "step, dtype, total", [(wide_already, NARROW, WIDE), (cast, WIDE, WIDE), (cast, NARROW, NARROW)]
)
def test_what_is_as_wide_as_its_total_stays(step, dtype, total):
    before, after = products_of(step, dtype, total)
    assert before == after == [total]


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w.astype(x.dtype))
    return jnp.square(x.astype(WIDE)).mean()


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_on_a_gpu_gradients_are_rounded_once(platform):
    """As without sub-batches. On a CPU, whose products do not widen, every other one differs."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (64, 32))
    x = jax.random.normal(keys[1], (512, 64), NARROW)
    y = jax.random.normal(keys[2], (512, 32), NARROW)
    loss = lambda w, x, y: ((x @ w.astype(x.dtype)).astype(WIDE) * y.astype(WIDE)).sum()
    captured = capture(jax.jit(jax.grad(loss)).trace(w, x, y).jaxpr, platform=platform)
    batch = follow_batch(captured.flat, [None, Layout(0), Layout(0)], 512)
    split = captured.in_sub_batches(batch, 4)
    rewritten = rewrite(split, keep_plan(split.program, None, 0, 0.0))
    [parts] = jax.jit(jexc.jaxpr_as_fun(rewritten))(w, x, y)
    same = np.asarray(parts) == np.asarray(jax.jit(jax.grad(loss))(w, x, y))
    assert (np.mean(same) > 0.98) == (platform == "gpu")


@pytest.mark.gpu_compile
@pytest.mark.parametrize("dtype", [WIDE, NARROW])
def test_products_add_to_totals_as_they_write(dtype):
    """One kernel adds to each total of weights, and needs nothing more for that."""
    step = lambda params, x: (
        [w - 0.1 * d for w, d in zip(params, jax.grad(loss)(params, x), strict=True)]
    )
    params = [jax.ShapeDtypeStruct(shape, WIDE) for shape in ((1024, 4096), (4096, 1024)) * 2]
    x = jax.ShapeDtypeStruct((8192, 1024), dtype)
    budgeted = vmem_jax.jit(step, budget="1GiB", donate_argnums=0, sub_batches=4)
    compiled = budgeted.lower(params, x).compile(target="h200")
    last = compiled.attempts[-1]
    assert last.need == pytest.approx(last.predicted_need, rel=0.05)
    weights = re.compile(r"= f32\[(?:1024,4096|4096,1024)\]\S* fusion\((.*)\), kind=(\w+)")
    lines = [line for line in compiled.as_text().splitlines() if "while/body" in line]
    found = [match.groups() for match in map(weights.search, lines) if match]
    adding = [kind for given, kind in found if "get-tuple-element" in given]
    assert adding == ["kCustom"] * len(params)
