"""Code in a Python of its own: other numbers of devices, or an end that takes the process along."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def in_subprocess(code, devices):
    """Runs `code` in a Python with so many CPU devices, and returns what it prints."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout
