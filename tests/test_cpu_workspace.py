"""What XLA:CPU holds beside operands and results, predicted and compiled."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.core.need import need_nbytes
from vmem_jax.jax_compat import FENCE_OPTIONS

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
SHAPES = {LAST: ((16, 24, 24, 32), (3, 3, 32, 32)), FIRST: ((16, 32, 24, 24), (32, 32, 3, 3))}
MIB = 1 << 20


def convolution(numbers, stride, x, w):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)


def compiled_temp(fun, *args):
    options = FENCE_OPTIONS["cpu"]
    compiled = jax.jit(fun).lower(*args).compile(compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes


def workspace(fun, *args, platform="cpu"):
    program = capture(jax.jit(fun).trace(*args).jaxpr, platform=platform).program
    return max(step.workspace for step in program.steps)


def passes(numbers, stride, dtype):
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES[numbers])
    forward = functools.partial(convolution, numbers, stride)
    y = jax.eval_shape(forward, x, w)
    to_x = lambda x, w, g: jax.vjp(lambda x: forward(x, w), x)[1](g)
    to_w = lambda x, w, g: jax.vjp(lambda w: forward(x, w), w)[1](g)
    return {"forward": (forward, x, w), "to_x": (to_x, x, w, y), "to_w": (to_w, x, w, y)}


@pytest.mark.parametrize("which", ["forward", "to_x", "to_w"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("numbers", [LAST, FIRST])
def test_copies_of_a_convolution(numbers, stride, which):
    """But for one of a filter, and of a small result, which here has a place throughout."""
    fun, *args = passes(numbers, stride, "float32")[which]
    assert workspace(fun, *args) == pytest.approx(compiled_temp(fun, *args), abs=0.3 * MIB)
    if stride == 1:
        assert workspace(fun, *args, platform="gpu") == 0


def test_halves_are_cast():
    """Beside the result, in whose place XLA can put a copy of an operand, but not in this step."""
    fun, *args = passes(LAST, 1, "bfloat16")["to_w"]
    assert workspace(fun, *args) == pytest.approx(compiled_temp(fun, *args), abs=0.2 * MIB)
    fun, x, w = passes(LAST, 1, "bfloat16")["forward"]
    x_nbytes, out = 2 * x.size, 2 * x.size
    assert workspace(fun, x, w) == 2 * x_nbytes + 4 * w.size + 2 * out - out


def test_a_loop_convolves_as_the_dimensions_stand():
    """As in sub-batches."""
    fun, *args = passes(LAST, 1, "float32")["to_w"]
    x, w, g = args

    def looped(x, w, g):
        once = lambda total, each: (total + fun(each[0], w, each[1])[0], None)
        parts = lambda a: a.reshape(4, 4, *a.shape[1:])
        return lax.scan(once, jnp.zeros(w.shape), (parts(x), parts(g)))[0]

    x_nbytes = 4 * x.size // 4
    assert compiled_temp(looped, x, w, g) < 1.1 * 2 * x_nbytes  # what a part reads, and no copy


@pytest.mark.parametrize("dtype, words", [("uint32", 3), ("uint8", 3.75)])
def test_random_bits(dtype, words):
    def bits(key):
        return jax.random.bits(key, (512, 1024), dtype)

    key = jax.random.key(0)
    assert workspace(bits, key) == words * 2 * MIB
    assert compiled_temp(bits, key) == pytest.approx(words * 2 * MIB, abs=0.6 * MIB)


def test_a_step_of_convolutions_fits_in_half_of_plain():
    """Predicted within 15 %: without the copies it was 28 to 56 % too low."""
    import vmem_jax

    ws = [jax.ShapeDtypeStruct(SHAPES[LAST][1], "float32")] * 6
    x = jax.ShapeDtypeStruct(SHAPES[LAST][0], "float32")

    def step(ws, x):
        def loss(ws):
            z = x
            for w in ws:
                z = jnp.tanh(convolution(LAST, 1, z, w))
            return (z**2).mean()

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    budgeted = vmem_jax.jit(step, budget=0.5, allow=("order", "recompute"), donate_argnums=0)
    last = budgeted.lower(ws, x).compile().attempts[-1]
    assert last.predicted_need == pytest.approx(last.need, rel=0.15)


class Dropouts(nnx.Module):
    """Six convolutions, with batch norm, ReLU and dropout after each."""

    def __init__(self, rngs):
        channels = [3] + [32] * 6
        pairs = itertools.pairwise(channels)
        self.convolutions = nnx.List([nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in pairs])
        self.norms = nnx.List([nnx.BatchNorm(32, rngs=rngs) for _ in range(6)])
        self.dropouts = nnx.List([nnx.Dropout(0.1, rngs=rngs) for _ in range(6)])
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        for layers in zip(self.convolutions, self.norms, self.dropouts, strict=True):
            convolution, norm, dropout = layers
            x = dropout(nnx.relu(norm(convolution(x))))
        return self.head(x.mean((1, 2)))


def test_a_network_with_six_dropouts_fits_half_of_its_need():
    """The counters of all six generators made first, beside each other, are more than half of it."""
    model = Dropouts(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    args = model, optimizer, jnp.ones((128, 24, 24, 3)), jnp.zeros(128, jnp.int32)
    compiled = vmem_jax.jit(step, budget=0.5).lower(*args).compile()
    assert need_nbytes(compiled) <= 136.9 * MIB  # plain jit needs 273.6 on each version of JAX


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_in_half_precision_holds_casts_to_float32(dtype):
    """Of JAX 0.10 those of its stacks as a whole, 22 of 65 MiB; since then those of an iteration."""

    def loss(ws, x):
        def layer(x, w):
            up, down = (each.astype(dtype) for each in w)
            return x + jax.nn.gelu(x @ up) @ down, None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32) ** 2)

    def step(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    shapes = (4, 256, 1024), (4, 1024, 256)
    ws = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    x = jax.ShapeDtypeStruct((1024, 256), dtype)
    budgeted = vmem_jax.jit(step, budget="120MiB", sub_batches=1, donate_argnums=0)
    made = budgeted.lower(ws, x).compile()
    assert made.attempts[0].predicted_need == pytest.approx(made.need_nbytes, rel=0.095)
