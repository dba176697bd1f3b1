"""Progress: shown on a terminal once it takes long, never in a log, and gone at the end."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax import progress
from vmem_jax.progress import doing


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """What the terminal shows, where nobody is patient and a timer runs at once."""

    class Now:
        def __init__(self, seconds, run):
            self.run = run

        def start(self):
            self.run()

        def cancel(self):
            pass

    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setattr(progress.threading, "Timer", Now)
    monkeypatch.setenv("TERM", "xterm")
    return lambda: re.sub(r"\x1b\[[?\d;]*\w", "", terminal.getvalue())


def test_a_terminal_shows_what_goes_on(shown):
    with doing("planning a"), doing("compiling b"):
        pass
    assert "vmem_jax: planning a" in shown()
    assert progress._local.shown.live is None and not progress._local.shown.doing


def test_planning_and_compiling_a_step_are_shown(shown):
    step = vmem_jax.jit(lambda x: jnp.tanh(x @ x), budget="1MiB")
    step.plan(jax.ShapeDtypeStruct((16, 16), jnp.float32))
    assert "planning <lambda>" in shown()


def test_a_log_shows_nothing(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=log))
    with doing("planning a"):
        assert progress._local.shown.timer is None
    assert not log.getvalue()


def test_an_error_ends_it(shown):
    with pytest.raises(ValueError), doing("planning a"):
        raise ValueError
    assert not progress._local.shown.doing
