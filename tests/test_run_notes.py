"""What an error of a run says besides XLA's words: CUDA graphs. Memory: test_endurance."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from vmem_jax.api import run_notes
from vmem_jax.jax_compat import GRAPHS

CAPTURE = "INTERNAL: Failed to end stream capture: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


def notes(message):
    error = RuntimeError(message)
    run_notes.note(error, "train", None, {"w": jnp.ones(3)})
    return "".join(getattr(error, "__notes__", ()))


def test_a_kernel_that_cannot_be_recorded_is_said_with_the_flag_that_helps(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    says = notes(CAPTURE)
    assert "`train`" in says and f"--{GRAPHS}=-convolution" in says
    assert "load a checkpoint" not in says


def test_deleted_arguments_are_said():
    error, given = RuntimeError(CAPTURE), jnp.ones(3)
    given.delete()
    run_notes.note(error, "train", None, [given])
    assert "load a checkpoint" in "".join(error.__notes__)


@pytest.mark.parametrize("how", ["another error", "the user's graphs"])
def test_other_errors_stay_as_they_are(how, monkeypatch):
    if how == "the user's graphs":
        monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}=+convolution")
    assert not notes("INTERNAL: a kernel failed" if how == "another error" else CAPTURE)
