"""run_notes: what to do after XLA's error of a planned step's run, in a note of that error."""

from __future__ import annotations

from typing import Any

import jax

from vmem_jax import jax_compat as compat
from vmem_jax.api import oom
from vmem_jax.compiler.compile import is_chosen

DELETED = " JAX has deleted the donated arguments: load a checkpoint."


def note(error: BaseException, name: str, compiled: Any, arguments: Any) -> None:
    """Adds a note to errors of a run whose cause is known: too little memory, or a convolution that
    no CUDA graph can hold. Other errors stay as they are.

    Args:
      error: what the run raised.
      name: of the step.
      compiled: the compiled step that ran.
      arguments: of the run, a tree.
    """
    arrays = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
    deleted = DELETED if any(x.is_deleted() for x in arrays) else ""
    if oom.lacks_memory(error):
        error.add_note(oom.needed(name, compiled, arrays) + deleted)
    elif "capture" in str(error).lower() and not is_chosen([compat.GRAPHS], ()):
        error.add_note(
            f"A library's kernel of `{name}` cannot be recorded into a CUDA graph; vmem_jax has "
            f"convolutions recorded. Add --{compat.GRAPHS}=-convolution to the environment variable "
            "XLA_FLAGS: they are launched one by one then." + deleted
        )
