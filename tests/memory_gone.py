"""A step that was planned, and runs when the memory that it was planned for is gone."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def train(w, x):
    """A step that holds four activations as large as `x`."""

    def loss(w):
        y = x
        for _ in range(4):
            y = jnp.tanh(y @ w)
        return jnp.square(y).mean()

    return w - 0.1 * jax.grad(loss)(w)


def notes_without_memory(budgeted, w, x):
    """What the error of a run of `budgeted` says besides XLA's words; the run must lack memory. The
    notes say so if its donated argument is gone."""
    try:
        budgeted(w, x)
    except jax.errors.JaxRuntimeError as error:
        assert "RESOURCE_EXHAUSTED" in str(error), error
        says = "".join(error.__notes__)
    else:
        raise AssertionError("it ran without memory")
    assert ("load a checkpoint" in says) == w.is_deleted(), says
    return says
