"""Copies that XLA makes for products that merge dimensions which do not lie together."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from built import needs_cuda
from jax import lax

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.core.run_order import as_run
from vmem_jax.core.schedule import schedule

TOKENS, BATCH, WIDTH, WORDS = 64, 32, 128, 256
HIDDEN = TOKENS * BATCH * WIDTH * 2  # bytes of all hidden states
SHAPES = [
    jax.ShapeDtypeStruct(shape, "bfloat16")
    for shape in ((WIDTH, WIDTH), (WIDTH, WORDS), (TOKENS, BATCH, WIDTH))
]


def loss(w, head, x, *, batch_first=True, cast=True):
    """Of a recurrent layer on x [tokens, batch, width], and a product of its hidden states."""
    if cast:  # the states are float32, as in Linen's cells
        w, x = w.astype(jnp.float32), x.astype(jnp.float32)

    def once(state, row):
        state = jnp.tanh(state @ w + row)
        return state, state

    states = lax.scan(once, jnp.zeros_like(x[0]), x)[1]
    if batch_first:
        states = jnp.swapaxes(states, 0, 1)
    return jnp.mean((states.astype(head.dtype) @ head).astype(jnp.float32) ** 2)


def programs(platform="gpu", **options):
    step = jax.grad(lambda *args: loss(*args, **options), (0, 1))
    return capture(jax.jit(step).trace(*SHAPES).jaxpr, platform=platform).program


def products(program):
    return [s for s in program.steps if s.op == "dot_general"]


@pytest.mark.parametrize("cast", [True, False])
def test_products_of_a_loops_states_copy_them(cast):
    """The states for the forward product and for the gradient to its weight, and the cotangent."""
    program = programs(cast=cast)
    found = [([program.buffers[b].nbytes for b in s.copied], s.recopied) for s in products(program)]
    assert sorted(found) == [([], True), ([HIDDEN], False), ([HIDDEN], False)]
    assert {s.workspace for s in products(program)} == {HIDDEN}


@pytest.mark.parametrize("options", [{"batch_first": False}, {"platform": "cpu"}])
def test_nothing_is_copied_where_they_lie_together_or_on_a_cpu(options):
    found = products(programs(**options))
    assert len(found) == 3
    assert not any(s.copied or s.recopied or s.workspace for s in found)


def test_dimensions_of_one_element_lie_anywhere():
    one = [jax.ShapeDtypeStruct((TOKENS, 1, WIDTH), "bfloat16")]
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(*SHAPES[:2], *one)
    found = products(capture(traced.jaxpr, platform="gpu").program)
    assert not any(s.copied or s.recopied for s in found)


def test_an_operand_that_is_summed_over_its_slowest_dimension_is_not_copied():
    def step(w, x):
        states = lax.scan(lambda s, r: (s + r, s + r), jnp.zeros_like(x[0]), x)[1]
        return jnp.einsum("btf,tv->bfv", jnp.swapaxes(states, 0, 1), w)

    w = jax.ShapeDtypeStruct((TOKENS, WORDS), "bfloat16")
    [product] = products(capture(jax.jit(step).trace(w, SHAPES[2]).jaxpr, platform="gpu").program)
    assert product.copied == ()


def test_copies_are_kernels_of_their_own_in_xlas_order():
    program = programs()
    order = range(len(program.steps))
    found, _ = as_run(program, schedule(program, order, ()))
    copies = [s for s in found.steps if s.op == "transpose"]
    assert [found.buffers[s.writes[0]].nbytes for s in copies] == [HIDDEN] * 3
    assert all(s.workspace == 0 for s in products(found))
    made = {w: s.op for s in found.steps for w in s.writes}
    read = [made[r] for s in products(found) for r in s.reads if r in made]
    assert read.count("transpose") == 2
    assert sum(made[r] == "dot_general" for s in copies for r in s.reads if r in made) == 1


@pytest.mark.gpu_compile
@pytest.mark.parametrize("cast", [True, False])
def test_xla_makes_these_copies(cast):
    needs_cuda()

    def train(ws, x):
        grads = jax.grad(lambda ws: loss(*ws, x, cast=cast))(ws)
        return [w - g for w, g in zip(ws, grads, strict=True)]

    step = vmem_jax.jit(train, budget="10GiB", policy="exact", donate_argnums=0)
    made = step.lower(SHAPES[:2], SHAPES[2]).compile(target="h200")
    found = products(programs(cast=cast))
    predicted = sum(len(s.copied) + s.recopied for s in found)
    transposes = r"\n *%\w*transpose(?:_fusion)?[\w.]* = .* fusion\("
    assert len(re.findall(transposes, made.as_text())) == predicted
