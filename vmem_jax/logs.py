"""logs: what is logged. By default warnings alone, each once; `VMEM_JAX_LOG` shows more.

Messages go to absl's logger, as JAX's do: `--verbosity` and `absl.logging.set_verbosity` work too.
"""

from __future__ import annotations

import logging as standard
import os

from absl import logging

VARIABLE = "VMEM_JAX_LOG"
LEVELS = ("debug", "info", "warning", "error", "fatal")

_said: set[tuple[str, ...]] = set()


def set_up(level: str | None) -> None:
    """Shows messages from `level` on, one of `LEVELS` in any case; None or "" leaves absl's level.

    Raises:
      ValueError: there is no such level.
    """
    if not level:
        return
    if level.lower() not in LEVELS:
        raise ValueError(f"{VARIABLE}={level!r} is none of {', '.join(LEVELS)}.")
    logging.set_verbosity(level.lower())
    if not standard.root.handlers:  # else nothing below a warning is printed
        logging.use_absl_handler()


def warn_once(step: str, text: str) -> None:
    """Logs `text` about the step of that name, unless this process said so before."""
    if (step, text) not in _said:
        _said.add((step, text))
        logging.warning("%s: %s", step, text)


def from_environment() -> None:
    """`set_up` with the level of the environment."""
    set_up(os.environ.get(VARIABLE))
