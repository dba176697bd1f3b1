"""Kernels that read the same arrays, which XLA:GPU merges: what they share is read once."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.program import Phase
from vmem_jax.devices.targets import target

MACHINE = CARDS["h200"].machine
LAYERS, ROWS, WIDTH = 4, 512, 256
X = ROWS * WIDTH * 4  # bytes of what a layer carries
W, ROW = WIDTH * WIDTH * 4, WIDTH * 4


def scanned(layer):
    """A loop of `layer`, (x [ROWS, WIDTH], w [WIDTH, WIDTH]) -> (x, results that are stacked)."""
    return lambda ws, x: lax.scan(layer, x, ws)


def arguments(sharding=None):
    shapes = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]


def steps_of(step, platform="", args=None):
    closed = jax.jit(step).trace(*(args or arguments())).jaxpr
    return capture(closed, platform=platform).program.steps


def moved(layer, platform=""):
    """Bytes of each fused kernel of an iteration."""
    [loop] = [step for step in steps_of(scanned(layer), platform) if step.op == "scan"]
    return [step.nbytes for step in loop.body if step.fusible]


def elementwise(x, w):
    return lax.sort(jnp.sin(x + 1)), lax.sort(jnp.cos(x + 1))


def apart(x, w):
    """Two kernels of a library stand between the two that read `x`."""
    a = lax.sort(lax.sort(jnp.sin(x + 1)))
    return a, lax.sort(jnp.cos(x + 1))


def reduced_too(x, w):
    return lax.sort(jnp.sin(x + 1)), lax.sort((x * x).sum(1))


def reduced_along_both(x, w):
    """A sort stands between the two, which would be one kernel here without."""
    a = lax.sort((x * x).sum(1))
    b = lax.sort(x)
    return b, (a, lax.sort((x * x * x).sum(0)))


def dependent(x, w):
    return lax.sort(lax.sort(jnp.sin(x + 1)) * x), None


def behind_a_barrier(x, w):
    a, y = lax.optimization_barrier((jnp.sin(x + 1), x))
    return lax.sort(a), lax.sort(jnp.cos(y + 1))


def through_a_barrier(x, w):
    """The two that read `w` are merged; what the barrier gives through of `x` is in its memory."""
    y, b = lax.optimization_barrier((x, lax.sort(x)))
    return b, (lax.sort(jnp.sin(x + 1) * w[0]), lax.sort(jnp.cos(y + 1) * w[0]))


def of_another_shape(x, w):
    return lax.sort(jnp.sin(x + 1)), lax.sort(jnp.cos(x[: ROWS // 2] + 1))


def of_one_operation(x, w):
    return lax.sort(jnp.sin(x)), lax.sort(jnp.cos(x))


def stacked(x, w):
    return lax.sort(jnp.sin(x + 1)), jnp.cos(x + 1)


def maker_and_reduction(x, w):
    """A library and a sum read what is made: it is made with the sum, which need not read it."""
    y = x * (x + 1)
    return lax.sort(y), lax.sort(y.sum(1))


def maker_and_columns(x, w):
    y = x * (x + 1)
    return lax.sort(y), lax.sort(y.sum(0))


def maker_and_reader(x, w):
    y = jnp.sin(x + 1)
    return lax.sort(y), lax.sort(jnp.exp(y) + 1)


def maker_and_reader_behind(x, w):
    """What is made is read by a library, and with what that makes by another kernel."""
    y = jnp.sin(x + 1)
    return lax.sort(jnp.cos(lax.sort(y)) * y), None


LAYER_KERNELS = [
    (elementwise, [2 * X, X]),
    (apart, [2 * X, X]),
    (reduced_too, [2 * X, ROWS * 4]),
    (through_a_barrier, [2 * ROW, 2 * X + ROW, X]),
    (maker_and_reduction, [2 * X, ROWS * 4]),
    (maker_and_columns, [2 * X, ROW]),
    (maker_and_reader, [2 * X, X]),
]
"""Layers, and the bytes that the kernels move which XLA merges."""

LAYER_KERNELS_APART = [
    (reduced_along_both, [X + ROWS * 4, X + ROW]),
    (dependent, [2 * X, 3 * X]),
    (behind_a_barrier, [2 * X, 2 * X]),
    (of_another_shape, [2 * X, X]),
    (of_one_operation, [2 * X, 2 * X]),
    (stacked, [2 * X, 2 * X]),
    (maker_and_reader_behind, [2 * X, 3 * X]),
]
"""Layers whose kernels XLA does not merge."""


@pytest.mark.parametrize(("layer", "expected"), [*LAYER_KERNELS, *LAYER_KERNELS_APART])
def test_what_the_kernels_of_a_layer_move(layer, expected):
    assert moved(layer) == expected


@pytest.mark.parametrize(
    ("layer", "count"),
    [(layer, 1) for layer, _ in LAYER_KERNELS] + [(layer, 0) for layer, _ in LAYER_KERNELS_APART],
)
def test_a_merged_kernel_is_launched_once(layer, count):
    [loop] = [step for step in steps_of(scanned(layer)) if step.op == "scan"]
    assert sum(not step.launched for step in loop.body) == count
    for step in loop.body:
        alone = dataclasses.replace(step, launched=True)
        less = MACHINE.seconds(alone) - MACHINE.seconds(step)
        assert less == pytest.approx(0 if step.launched else MACHINE.launch)


def test_nothing_is_shared_where_xla_compiles_for_a_cpu():
    assert moved(elementwise, "cpu") == [2 * X, 2 * X]


def test_outside_of_loops_updates_share_their_gradient_and_the_forward_pass_nothing():
    """What the forward pass makes a plan may compute again, and apart from the other then."""

    def step(w, m, n, x):
        waves = jnp.sin(x + 1), jnp.cos(x + 1)
        loss = lambda w: ((x @ w) ** 2).sum()
        g = jax.grad(loss)(w)
        m, n = 0.9 * m + g, 0.99 * n + g * g
        return w - m, m, n, *waves

    shapes = ((WIDTH, WIDTH),) * 3 + ((ROWS, WIDTH),)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    made = steps_of(step, args=args)
    adds = [s.nbytes for s in made if s.op == "add" and s.fusible]
    assert adds == [3 * W, 2 * W]
    waves = [s for s in made if s.op in ("sin", "cos") and 0 in s.equations]
    assert [(s.phase, s.nbytes) for s in waves] == 2 * [(Phase.FORWARD, 2 * X)]


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("layer", "count"),
    [(layer, 1) for layer, _ in LAYER_KERNELS] + [(layer, 0) for layer, _ in LAYER_KERNELS_APART],
)
def test_xla_merges_them(layer, count):
    there = arguments(target("h200").sharding())
    text = jax.jit(scanned(layer)).lower(*there).compile().as_text()
    several = re.findall(r"= \(f32\[(?:512|256)\b[^=]*, f32\[[\d,]*\]\S*\) fusion\(", text)
    assert len(several) == count
