"""A step of another framework, in a process of its own, that takes turns with steps of JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class Peer:
    """The process of `torch_resnet.py`; it holds the GPU's memory until it ends.

    Attributes:
      about: what it printed when it had warmed up.

    Raises:
      RuntimeError: it ended instead, with the end of what it said.
    """

    def __init__(self, *arguments: str, script: str = "torch_resnet.py") -> None:
        command = [sys.executable, str(Path(__file__).parent / script), *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        self.about: dict[str, Any] = json.loads(self._read("{"))

    def block(self, steps: int) -> float:
        """Milliseconds a step of `steps` steps, that run now."""
        assert self._process.stdin is not None, "it was opened with a pipe"
        print(steps, file=self._process.stdin, flush=True)
        return float(self._read("0123456789"))

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()

    def _read(self, begins: str) -> str:
        """The next line that begins with one of these characters: libraries print others."""
        assert self._process.stdout is not None, "it was opened with a pipe"
        said = []
        for line in self._process.stdout:
            if line[0] in begins:
                return line
            said.append(line)
        raise RuntimeError(f"{self._process.args} ended: {''.join(said)[-400:]}")
