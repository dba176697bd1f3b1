"""progress: a sign of life on a terminal while planning and compiling take long; none in logs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

PATIENCE = 3.0
"""Seconds that nothing is shown."""


class _Shown:
    """What is going on, outermost first, and the line that says so once it takes long."""

    def __init__(self) -> None:
        self.doing: list[str] = []
        self.live: Any = None
        self.spinner: Any = None
        self.timer: threading.Timer | None = None
        self.lock = threading.RLock()

    def begin(self, what: str) -> None:
        with self.lock:
            self.doing.append(what)
            if len(self.doing) == 1 and sys.stderr.isatty():
                self.timer = threading.Timer(PATIENCE, self.show)
                self.timer.daemon = True
                self.timer.start()
            self.update()

    def end(self) -> None:
        with self.lock:
            self.doing.pop()
            self.update()
            if not self.doing:
                if self.timer is not None:
                    self.timer.cancel()
                if self.live is not None:
                    self.live.stop()
                self.timer = self.live = None

    def show(self) -> None:
        # imported late: most calls are over before
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        with self.lock:
            if self.doing and self.live is None:
                self.spinner = Spinner("dots", self.text)
                console = Console(file=sys.stderr)
                self.live = Live(self.spinner, console=console, transient=True)
                self.live.start(refresh=True)

    def update(self) -> None:
        if self.live is not None and self.doing:
            self.spinner.update(text=self.text)

    @property
    def text(self) -> str:
        return "vmem_jax: " + ", ".join(self.doing)


class _Local(threading.local):
    """Of each thread what it shows."""

    def __init__(self) -> None:
        self.shown = _Shown()


_local = _Local()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Shows `what` on standard error while the block runs, if that is a terminal, from `PATIENCE`
    seconds after the outermost block began."""
    shown = _local.shown
    shown.begin(what)
    try:
        yield
    finally:
        shown.end()
