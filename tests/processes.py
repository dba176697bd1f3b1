"""Scripts that need a process of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_script(text: str, **environment: str) -> str:
    """Runs `text` beside these modules; fails unless it ends well; returns what it printed."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
