"""Random words: XLA:GPU makes them in the kernel of what is made of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.capture.bits import pack_p
from vmem_jax.core.cards import CARDS

N, WIDTH = 1024, 256
SHAPES = (
    jax.ShapeDtypeStruct((N, WIDTH), jnp.float32),
    jax.eval_shape(jax.random.key, 0),
)


def steps_of(fun, platform="gpu"):
    """(operation, bytes of its results for each element of `x`) of steps with large ones."""
    program = capture(jax.jit(fun).trace(*SHAPES).jaxpr, platform=platform).program
    sizes = lambda step: [program.buffers[b].nbytes // (N * WIDTH) for b in step.writes]
    return [(step.op, sizes(step)) for step in program.steps if any(sizes(step))]


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def test_a_mask_is_drawn_in_one_kernel_and_once():
    backward = jax.grad(lambda x, key: jnp.square(dropped(jnp.sin(x), key)).sum())
    found = steps_of(backward)
    assert [sizes for op, sizes in found if op == "random_bits"] == [[1]]
    assert all(op != "lt" for op, _ in found)


def test_words_exist_on_a_cpu():
    assert ("random_bits", [4]) in steps_of(dropped, "cpu")


def test_a_draw_ends_with_the_smallest_value():
    scaled = lambda x, key: x * (jax.random.bernoulli(key, 0.9, x.shape).astype(x.dtype) / 0.9)
    assert ("random_bits", [1]) in steps_of(scaled)
    noisy = lambda x, key: jnp.sin(x) @ jax.random.normal(key, (WIDTH, 4 * N))[:, :WIDTH]
    assert ("random_bits", [16]) in steps_of(noisy)


def test_words_that_several_kernels_read_exist():
    def both(x, key):
        words = jax.random.bits(key, x.shape)
        return jnp.where(words > 7, x, 0), lax.sort(words, dimension=1)

    assert ("random_bits", [4]) in steps_of(both)


def test_other_generators_write_their_words():
    def step(x):
        return dropped(x, jax.random.key(0, impl="rbg"))

    program = capture(jax.jit(step).trace(SHAPES[0]).jaxpr, platform="gpu").program
    made = {s.op: [program.buffers[b].nbytes for b in s.writes] for s in program.steps}
    assert made["random_bits"] == [4 * N * WIDTH]


@pytest.mark.gpu_compile
def test_a_draw_needs_what_is_predicted():
    step = lambda x, key: jax.random.bernoulli(key, x.mean(), (4096, 4096))
    step = vmem_jax.jit(step, policy="exact", budget="1GiB")
    [attempt] = step.lower(*SHAPES).compile(target="h200").attempts
    assert attempt.need == pytest.approx(attempt.predicted_need, rel=0.03)


def test_a_mask_takes_what_the_card_took():
    """60.6 microseconds on an H200 (JAX 0.11.2), in a step of ViT-L."""
    drawn = lambda key: jax.random.bernoulli(key, 0.9, (64, 197, 1024))
    found = capture(jax.jit(drawn).trace(SHAPES[1]).jaxpr, platform="gpu").program
    seconds = sum(map(CARDS["h200"].machine.seconds, found.steps))
    assert 1e6 * seconds == pytest.approx(60.6, rel=0.15)


@pytest.mark.parametrize(
    "shape, axis, us", [((8, 16, 1024, 1024), 2, 438), ((32, 197, 4096), 2, 86)]
)
def test_a_packed_mask_takes_what_the_card_took(shape, axis, us):
    """Microseconds of an H200 (JAX 0.11.2), in steps of GPT-2 medium and of ViT-L."""
    drawn = lambda key: pack_p.bind(jax.random.bernoulli(key, 0.9, shape), axis=axis)
    found = capture(jax.jit(drawn).trace(SHAPES[1]).jaxpr, platform="gpu").program
    seconds = sum(map(CARDS["h200"].machine.seconds, found.steps))
    assert 1e6 * seconds == pytest.approx(us, rel=0.05)
