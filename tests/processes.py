"""Code in a Python of its own: other numbers of devices, or an end that takes the process along."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path


def run_script(text: str, **environment: str) -> str:
    """Runs `text` beside these modules; fails unless it ends well; returns what it printed."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    return run.stdout


def in_subprocess(text: str, devices: int) -> str:
    """Runs `text` where JAX has so many CPU devices; returns what it printed."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return run_script(text, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


@contextlib.contextmanager
def meanwhile(text: str) -> Iterator[None]:
    """Runs `text` in another process, which prints a line when it is ready and waits for input."""
    command = [sys.executable, "-c", textwrap.dedent(text)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parent, **pipes) as other:
        try:
            assert other.stdout.readline(), "it ended before it was ready"
            yield
        finally:
            other.communicate()
    assert other.returncode == 0
