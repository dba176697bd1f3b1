"""How much of an H200's 132 multiprocessors large products leave idle."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from vmem_jax.capture import capture
from vmem_jax.capture.product_waves import share
from vmem_jax.capture.product_workspaces import Products, Size
from vmem_jax.core.cards import CARDS

CORES = 132


def size(rows, columns, batch=1):
    return Size(batch, rows, columns, 1024, 2, 2, 4, 2)


@pytest.mark.parametrize(
    "rows, columns, idle",
    [
        (3152, 1024, 0.18),  # 200 tiles of 128 by 128 in two waves
        (6304, 1024, 0.125),  # 350 tiles of 128 by 160 in three
        (3152, 4096, 0.0),
        (25216, 1024, 0.0),
        (8192, 1024, 0.0),
        (16384, 2048, 0.0),
    ],
)
def test_the_last_wave_is_rarely_full(rows, columns, idle):
    assert share(size(rows, columns), CORES) == pytest.approx(1 - idle, abs=0.01)


def test_few_tiles_batches_and_unknown_cards_reach_the_rate():
    assert share(size(1024, 1024), CORES) == 1.0  # 64 tiles: in parts
    assert share(size(3152, 1024, batch=8), CORES) == 1.0
    assert share(size(3152, 1024), 0) == 1.0
    assert share(size(0, 1024), CORES) == 1.0


def test_a_card_with_other_multiprocessors_leaves_others_idle():
    assert share(size(3152, 1024), 100) > 0.95 > share(size(3152, 1024), CORES)


@pytest.mark.parametrize("columns, us, rel", [(1024, 13.5, 0.1), (4096, 37.2, 0.05)])
def test_products_take_what_the_card_took(columns, us, rel):
    """The mean of those of a ViT-L's layers in sub-batches of 16 images, on an H200 (JAX 0.11.2)."""
    shapes = (3152, 1024), (1024, columns)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    closed = jax.make_jaxpr(jnp.dot)(*args)
    found = capture(closed, platform="gpu", products=Products(cores=CORES, major=9)).program
    seconds = CARDS["h200"].machine.seconds
    [product] = found.steps
    assert 1e6 * seconds(product) == pytest.approx(us, rel=rel)
    alone = dataclasses.replace(product, efficiency=1.0)
    assert (seconds(alone) < seconds(product)) == (columns == 1024)
