"""Warnings about a plan: each once, true, and none without a reason."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax import logs
from vmem_jax.api.notices import NoticeParams, _a_profile_would_tell

WEIGHTS = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 6
BATCH = jax.ShapeDtypeStruct((2048, 32), jnp.float32)


def train_step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def said(caplog, budget, **options):
    """The warnings of planning within `budget`."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="absl"):
        vmem_jax.jit(train_step, budget=budget, donate_argnums=0, **options).plan(WEIGHTS, BATCH)
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(logs, "_said", set())


def test_a_budget_that_plain_jit_meets_is_said_once(caplog):
    for budget in ("1GiB", 1.0):
        (text,) = said(caplog, budget)
        assert text.startswith("train_step: plain jit ") and "would save memory" in text
        assert said(caplog, budget) == []
    assert said(caplog, "device") == []  # whose budget is none of the user's
    assert said(caplog, 0.6) == []


def test_a_slow_plan_is_said_with_the_budget_that_would_do(caplog, monkeypatch):
    monkeypatch.setattr("vmem_jax.api.notices.PARAMS", NoticeParams(slow=1.001))
    (text,) = said(caplog, 0.5)
    assert "times as long as plain jit" in text and "it would be 1.1 times" in text


@pytest.mark.parametrize("change, tells", [
    ({}, True),
    ({"target": "h200"}, False),  # nothing can be measured on a card that is not there
    ({"transport": ""}, False),  # nothing can move
    ({"immovable": ""}, False),  # it may move already
    ({"sources": ("measured",)}, False),
    ({"profile": False}, False),  # the user wants none
])  # fmt: skip
def test_when_a_profile_is_advised(change, tells):
    about = {"target": None, "transport": "ffi", "immovable": "roofline", "inlined": False}
    about |= {"sources": (), "profile": None, **change}
    step = types.SimpleNamespace(**about)
    step.costs, step.settings = step, step
    assert _a_profile_would_tell(step) == tells


def test_a_wrong_level_is_refused():
    with pytest.raises(ValueError, match=r"VMEM_JAX_LOG='loud' is none of debug, info, warning"):
        logs.set_up("loud")


@pytest.mark.parametrize("level, shown", [("", False), ("INFO", True)])
def test_the_log_is_silent_unless_asked(level, shown):
    program = (
        "import jax, jax.numpy as jnp, vmem_jax\n"
        "loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w))\n"
        "step = vmem_jax.jit(lambda w, x: w - jax.grad(loss)(w, x), budget=0.9)\n"
        "step(jnp.ones((8, 8)), jnp.ones((512, 8)))"
    )
    environment = {**os.environ, "VMEM_JAX_LOG": level, "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-c", program]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert ("compiles" in ended.stderr) == shown
    assert shown or (ended.stdout, ended.stderr) == ("", "")
