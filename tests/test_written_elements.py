"""What passes take for each element that they write, beside kernels of a ViT-L(128) and a decoder
on an H200 (JAX 0.11.2)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from test_columns import micros, of

from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS


def padded(x):
    return jnp.pad(x, [(0, 0), (0, 0), (0, 3), (0, 0)])


TRACED = {
    "one read and one written": (33.0, padded, of(128, 16, 197, 64)),
    "two read and one written": (39.7, lambda x, y: x + y, *2 * [of(128, 197, 1024)]),
    "in float32": (33.4, lambda x: x * 2, of(2048, 8192, dtype="float32")),
    "cast": (26.4, lambda x: x.astype("bfloat16"), of(2048, 8192, dtype="float32")),
    "written alone": (119, lambda x: jnp.full((24, 4096, 1024), x), of()),
}
"""Microseconds, step, shapes."""


@pytest.mark.parametrize("name", TRACED)
def test_passes_take_what_the_card_took(name):
    taken, call, *shapes = TRACED[name]
    assert micros(call, *shapes) == pytest.approx(taken, rel=0.1)


def test_what_is_transposed_behind_a_product_takes_as_long():
    def heads(weights, values, out):
        y = jnp.einsum("nhqk,nhkd->nqhd", weights, values)
        return y.reshape(128, 200, 1024) @ out

    shapes = of(128, 16, 200, 200), of(128, 16, 200, 64), of(1024, 1024)
    found = capture(jax.jit(heads).trace(*shapes).jaxpr, platform="gpu").program
    [step] = [s for s in found.steps if s.behind]
    machine = CARDS["h200"].machine
    assert step.behind == 2 * 2 * 128 * 200 * 16 * 64
    behind = machine.seconds(step) - machine.seconds(dataclasses.replace(step, behind=0))
    assert 1e6 * behind == pytest.approx(33.0, rel=0.1)
