"""products: a matrix product with what stands around it, by tiles and by passes, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vmem_jax.conv.products import Around, Operands, Tiling, by_passes, in_tiles

f32 = jnp.float32
TILING = Tiling(rows=32, columns=16, programs=3, warps=4, stages=2)


def _normal(seed, shape, dtype=f32):
    return jax.random.normal(jax.random.key(seed), shape, f32).astype(dtype)


def _forward(dtype):
    """Scale, bias and ReLU on load; the result, its sum and that of its squares on store."""

    def before(y, scale, bias):
        x = jax.nn.relu(y.astype(f32) * scale + bias).astype(dtype)
        return x, x

    def behind(product):
        y = product.astype(dtype)
        return y, y.astype(f32), jnp.square(y.astype(f32))

    return Around(before, behind, stored=1, results=1)


def _backward(dtype):
    """A batch norm's gradient on load; the gradient to the weight; a mask and sums on store."""

    def before(g, y, c, d):
        return ((g.astype(f32) * c + y.astype(f32) * d).astype(dtype),)

    def behind(product, y, scale):
        h = y.astype(f32) * scale
        g = jnp.where(h > 0, product, 0).astype(dtype)
        return jax.nn.relu(h).astype(dtype), g, g.astype(f32)

    return Around(before, behind, results=1, has_gradient=True)


def _both(around, given):
    """What the kernel makes of `given`, interpreted, and what passes make of it."""
    tiled = jax.jit(lambda given: in_tiles(around, given, TILING, interpret=True))
    whole = jax.jit(lambda given: by_passes(around, given))
    return jax.tree.leaves(tiled(given)), jax.tree.leaves(whole(given))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_tiles_are_as_near_to_float64_as_passes(dtype, kind):
    rows = 7 * TILING.rows  # three programs take three, two and two tiles
    if kind == "forward":
        around = _forward(dtype)
        given = Operands(
            _normal(0, (24, 32), dtype),
            [_normal(1, (rows, 24), dtype)],
            [_normal(2, (24,)), _normal(3, (24,))],
        )
    else:
        around = _backward(dtype)
        given = Operands(
            _normal(0, (24, 32), dtype),
            [_normal(1, (rows, 24), dtype), _normal(2, (rows, 24), dtype)],
            [_normal(3, (24,)), _normal(4, (24,))],
            [_normal(5, (rows, 32), dtype)],
            [_normal(6, (32,))],
        )
    ours, passes = _both(around, given)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), given)
        expected = jax.tree.leaves(_in_float64(kind, exact, dtype))
    assert len(ours) == len(passes) == len(expected) == (4 if kind == "forward" else 3)
    unit = float(jnp.finfo(dtype).eps)
    for mine, theirs, value in zip(ours, passes, expected, strict=True):
        assert mine.shape == theirs.shape == value.shape
        error = lambda x, v=value: np.abs(np.asarray(x, np.float64) - v).max() / np.abs(v).max()
        assert error(mine) <= max(4 * error(theirs), 4 * unit)


def _in_float64(kind, given, dtype):
    """The same in float64, rounded where the operands of products and what is stored are."""
    rounded = lambda x: np.asarray(jnp.asarray(x, f32).astype(dtype), np.float64)
    if kind == "forward":
        [y], (scale, bias) = given.rows, given.vectors
        x = rounded(np.maximum(y * scale + bias, 0))
        out = rounded(x @ given.weight)
        return x, out, out.sum(0), np.square(out).sum(0)
    (g, y), (c, d) = given.rows, given.vectors
    [other], [scale] = given.result_rows, given.result_vectors
    dy = rounded(g * c + y * d)
    masked = rounded(np.where(other * scale > 0, dy @ given.weight, 0))
    x = rounded(np.maximum(other * scale, 0))
    return masked, masked.sum(0), x.T @ dy


def test_tiles_that_do_not_divide_are_refused():
    given = Operands(_normal(0, (24, 32)), [_normal(1, (100, 24))], [_normal(2, (24,))] * 2)
    with pytest.raises(ValueError, match="do not divide a product of 100 rows and 32 columns"):
        in_tiles(_forward(f32), given, TILING)
