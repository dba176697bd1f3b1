"""What is elementwise and may be in a tile: Pallas for Triton lowers it, and it has XLA's values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.tiles import IN_TILES
from vmem_jax.conv.elementwise import Elementwise
from vmem_jax.conv.summed import in_tiles, tiling_of

ROWS, CHANNELS = 512, 64

BINARY = "add sub mul div max min eq ne lt le gt ge".split()
POSITIVE = ("log", "rsqrt", "sqrt")


def unary(name):
    of = getattr(lax, name)
    return lambda x, y: of(abs(x) + 1 if name in POSITIVE else x)


CASES = {
    "add_any": lambda x, y: jax.vjp(lambda x: (x + y, x * y), x)[1]((x, y))[0],
    "and": lambda x, y: lax.bitwise_and(x > 0, y > 0),
    "clamp": lambda x, y: lax.clamp(x, y, x + 1),
    "convert_element_type": lambda x, y: x.astype(jnp.float32) + y.astype(jnp.float32),
    "integer_pow": lambda x, y: lax.integer_pow(x, 3),
    "is_finite": lambda x, y: lax.is_finite(x / y),
    "not": lambda x, y: lax.bitwise_not(x > y),
    "one_minus_square": lambda x, y: jax.vjp(jnp.tanh, x)[1](y)[0],
    "or": lambda x, y: lax.bitwise_or(x > 0, y > 0),
    "pow": lambda x, y: lax.pow(abs(x) + 1, y),
    "select_n": lambda x, y: lax.select(x > y, x, y),
    "stop_gradient": lambda x, y: lax.stop_gradient(x) + y,
    "xor": lambda x, y: lax.bitwise_xor(x > 0, y > 0),
    **{name: getattr(lax, name) for name in BINARY},
}
CASES |= {name: unary(name) for name in IN_TILES - {*CASES}}


def tile(name, dtype):
    """Case `name` as elementwise equations, and the operands: two arrays."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(ROWS, CHANNELS)), dtype) for _ in range(2))
    closed = jax.jit(lambda x, y: CASES[name](x, y).astype(jnp.float32)).trace(x, y).jaxpr
    opened = compat.open_jaxpr(closed)
    eqns = tuple(opened.eqns)
    return Elementwise(eqns, tuple(opened.invars), (), tuple(opened.outvars)), (x, y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_it_is_lowered_for_a_gpu(name, dtype):
    make, rows = tile(name, dtype)
    run = jax.jit(lambda *rows: in_tiles(make, 0, rows, [], tiling_of(ROWS, CHANNELS)))
    with compat.on_described_gpu("NVIDIA H200"):
        run.trace(*rows).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", sorted(CASES))
def test_it_has_the_values_of_xla(name):
    make, rows = tile(name, "bfloat16")
    [made] = make(*rows)
    expected = jax.jit(CASES[name])(*rows).astype(jnp.float32)
    np.testing.assert_allclose(made, expected, rtol=2**-6, atol=2**-7)
