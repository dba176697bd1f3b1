"""explain_oom: the numbers of XLA's message, and what to do, in five lines."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax.errors import show_nbytes

XLA = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate {} [allocation-error='']"


@pytest.mark.parametrize(
    "amount, says", [("34359738368 bytes.", "34359738368 bytes"), ("32.00GiB.", "32.00 GiB")]
)
def test_five_lines_with_the_numbers(amount, says):
    held = jnp.ones((1 << 18,), jnp.float32)
    held_nbytes = sum(array.nbytes for array in jax.live_arrays())
    lines = vmem_jax.explain_oom(RuntimeError(XLA.format(amount))).splitlines()
    assert len(lines) == 5 and f"XLA asked for {says};" in lines[0]
    assert f"take {show_nbytes(held_nbytes)} of the " in lines[0]
    assert 'vmem_jax.jit(train_step, budget="device"' in lines[1] and "BudgetError" in lines[3]
    assert held_nbytes >= held.nbytes


def test_the_last_exception_is_taken_and_others_are_none(monkeypatch):
    monkeypatch.setattr(sys, "last_value", RuntimeError(XLA.format("5 bytes")), raising=False)
    assert "XLA asked for 5 bytes" in vmem_jax.explain_oom()
    assert "no lack of device memory: KeyError" in vmem_jax.explain_oom(KeyError("x"))
