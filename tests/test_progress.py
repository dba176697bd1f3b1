"""Progress: shown on a terminal once it takes long, never in a log, and gone at the end."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import vmem_jax
from vmem_jax import cli, progress
from vmem_jax.cli import profile as cli_profile
from vmem_jax.core.cards import CARDS
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


OWN = """
import jax, jax.numpy as jnp

def step(w, x):
    return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)

shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
"""


@pytest.mark.parametrize("out", [Terminal(), io.StringIO()], ids=["terminal", "log"])
def test_profiling_shows_bars_on_a_terminal_alone(tmp_path, monkeypatch, out):
    def machine(device, *, refresh, on_progress):
        on_progress(1, 2, "copies")
        on_progress(2, 2, "")
        return CARDS["cpu"].machine

    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(cli_profile, "measured_machine", machine)
    monkeypatch.setattr(cli_profile, "Console", lambda width: Console(file=out, width=160))
    (tmp_path / "own_profiled.py").write_text(OWN)
    own = f"{tmp_path / 'own_profiled.py'}"
    assert cli.main(["profile", f"{own}:step", "--args", f"{own}:shapes"]) == 0
    said = re.sub(r"\x1b\[[?\d;]*\w", "", out.getvalue())
    assert "Predicted step time" in said  # what was found is in both
    bars = re.findall(r"\b(device|steps) +\S* +(\d+)/(\d+)", said)
    if not out.isatty():
        assert bars == []
    else:
        assert ("device", "2", "2") in bars
        assert any(name == "steps" and done == total != "0" for name, done, total in bars)


def test_profiling_for_jit_is_shown(shown, tmp_path, monkeypatch):
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    machine = CARDS["cpu"].machine
    step = vmem_jax.jit(lambda x: jnp.tanh(x @ x), budget="1MiB", profile=True, machine=machine)
    step.plan(jax.ShapeDtypeStruct((16, 16), jnp.float32))
    assert "profiling steps" in shown()


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
