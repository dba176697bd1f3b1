"""Code in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(*works: Callable[[], object]) -> None:
    """Runs `works` at once, each in a thread of its own, and waits for all of them."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
